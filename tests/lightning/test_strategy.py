# SPDX-License-Identifier: Apache-2.0
"""Construction, the registry, what is refused, and the strategy's own collectives."""

import importlib
import inspect
import pickle
from pathlib import Path
from typing import Any

import bagua
import lightning_runs as runs
import pytest
import torch
import torch.distributed as dist
from bagua._lightning import check_version
from bagua.lightning import BaguaStatsCallback, BaguaStrategy
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from ranks import on_ranks
from reference import named
from torch import Tensor
from torch.distributed import ReduceOp
from troubleshooting import is_explained

DOCUMENTED = ["algorithm", "flatten", "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io"]
DOCUMENTED += ["precision_plugin", "bagua_kwargs"]


def test_constructor_is_the_documented_one() -> None:
    assert issubclass(BaguaStrategy, DDPStrategy)
    parameters = inspect.signature(BaguaStrategy).parameters
    assert list(parameters) == DOCUMENTED
    defaults = [p.default for p in parameters.values()][:-1]
    assert defaults == ["gradient_allreduce", True, None, None, None, None, None]


@pytest.mark.parametrize("algorithm", ["", *bagua.available_algorithms()])
def test_strategies_by_name(algorithm: str) -> None:
    name = f"bagua_{algorithm}" if algorithm else "bagua"
    trainer = Trainer(strategy=name, accelerator="cpu", devices=2, logger=False)
    assert isinstance(trainer.strategy, BaguaStrategy)
    assert trainer.strategy.algorithm == (algorithm or "gradient_allreduce")
    assert trainer.strategy.process_group_backend == "bagua"
    assert name in StrategyRegistry.available_strategies()


def test_the_error_without_the_import_of_ours_is_explained() -> None:
    # Not by monkeypatch, which restores what get() returns: this registry makes a strategy there.
    ours = {name: StrategyRegistry.pop(name) for name in list(StrategyRegistry) if name.startswith("bagua")}
    try:
        with pytest.raises(ValueError, match="bagua_bytegrad") as caught:
            Trainer(strategy="bagua_bytegrad", accelerator="cpu", logger=False)
    finally:
        StrategyRegistry.update(ours)
    assert is_explained(caught.value), caught.value


def test_unknown_algorithms_and_options_are_refused_at_once_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'nope'.*gradient_allreduce, bytegrad, .*async"):
        BaguaStrategy("nope")
    with pytest.raises(ValueError, match="'warmup_steps'; its options are: hierarchical, average"):
        BaguaStrategy("bytegrad", warmup_steps=3)
    with pytest.raises(ValueError, match="'device_ids'"):
        BaguaStrategy(device_ids=[0])
    with pytest.raises(TypeError, match="sync_interval_ms"):
        BaguaStrategy("async", sync_interval_ms="soon")
    for name in (None, BaguaStrategy):
        with pytest.raises(TypeError, match=r"algorithm must be a name, one of gradient_allreduce, .*, got"):
            BaguaStrategy(name)  # type: ignore[arg-type]
    with pytest.raises(MisconfigurationException, match="leave out ddp_comm_hook"):
        BaguaStrategy(ddp_comm_hook=lambda state, bucket: None)


@pytest.mark.parametrize("wrong", [{"hierarchical": False}, 0, None, "no"], ids=repr)
def test_only_a_bool_is_taken_for_flatten(wrong: Any) -> None:
    # An option that takes what was given, where there is one.
    option = "start_step" if wrong == 0 else "hierarchical"
    advice = rf"Options are given by name: write BaguaStrategy\('bytegrad', {option}="
    with pytest.raises(TypeError, match=rf"flatten must be a bool, got {type(wrong).__name__} .* {advice}"):
        BaguaStrategy("bytegrad", wrong)
    for flatten in (True, False):
        assert BaguaStrategy("bytegrad", flatten)._ddp_kwargs["gradient_as_bucket_view"] is flatten


def test_strategy_can_be_sent_to_spawned_ranks() -> None:
    copy = pickle.loads(pickle.dumps(BaguaStrategy("async", warmup_steps=7, start_method="spawn")))
    assert (copy.algorithm, copy._options, copy._start_method) == ("async", {"warmup_steps": 7}, "spawn")


class _Optimizers(runs.Module):
    def __init__(self, *kinds: str, schedulers: int = 0) -> None:
        super().__init__()
        self.kinds, self.schedulers = kinds, schedulers
        self.automatic_optimization = len(kinds) == 1

    def configure_optimizers(self) -> Any:
        optimizers = [runs.optimizer_for(kind, self) for kind in self.kinds]
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizers[0], 1) for _ in range(self.schedulers)]
        return optimizers, schedulers


QADAM_RULE = r"Bagua QAdam can only accept one QAdamOptimizer and one LR Scheduler\."


@pytest.mark.parametrize(
    ("algorithm", "kinds", "schedulers", "text"),
    [
        ("qadam", ("sgd",), 0, QADAM_RULE),
        ("qadam", ("qadam", "qadam"), 0, QADAM_RULE),
        ("qadam", ("qadam",), 2, QADAM_RULE),
        ("decentralized", ("sgd", "sgd"), 0, "takes one optimizer for all parameters, but .* returned 2"),
    ],
)
@on_ranks("pair")
def test_optimizers_that_the_algorithm_cannot_work_with(
    algorithm: str, kinds: tuple[str, ...], schedulers: int, text: str
) -> None:
    trainer = runs.quiet_trainer(BaguaStrategy(algorithm))
    with pytest.raises(MisconfigurationException, match=text):
        trainer.fit(_Optimizers(*kinds, schedulers=schedulers), runs.loader())


@on_ranks("pair")
def test_qadam_takes_a_scheduler() -> None:
    module = _Optimizers("qadam", schedulers=1)
    runs.quiet_trainer(BaguaStrategy("qadam", hierarchical=False), max_epochs=2).fit(module, runs.loader())
    assert module.optimizers().param_groups[0]["lr"] == pytest.approx(0.01 * 0.1 * 0.1)  # type: ignore[union-attr]


def _strategy() -> Any:
    """As it is while a Trainer works with it."""
    return runs.quiet_trainer("bagua").strategy


REDUCTIONS: list[tuple[Any, float]] = [
    *[(op, 4.5) for op in (None, "mean", "avg", ReduceOp.AVG)],
    *[(op, 9) for op in ("sum", ReduceOp.SUM)],
    (ReduceOp.PRODUCT, 18),
    *[(op, 3) for op in ("min", ReduceOp.MIN)],
    *[(op, 6) for op in ("max", ReduceOp.MAX)],
]
OF_INTEGERS: list[tuple[Any, int]] = [(ReduceOp.BAND, 2), (ReduceOp.BOR, 7), (ReduceOp.BXOR, 5), ("mean", 4)]


@on_ranks("pair")
def test_reduce_maps_operations() -> None:
    strategy = _strategy()
    cases = [*((*case, torch.float32) for case in REDUCTIONS), *((*case, torch.int64) for case in OF_INTEGERS)]
    for op, expected, dtype in cases:
        with named(op, dtype):
            tensor = torch.tensor([[3, 6][strategy.global_rank]], dtype=dtype)
            assert strategy.reduce(tensor, reduce_op=op) is tensor
            assert tensor.item() == expected


@pytest.mark.parametrize("op", ["SUM", "product", "nope", 0, [], ReduceOp.PREMUL_SUM], ids=str)
def test_reduce_refuses_other_operations(op: Any) -> None:
    with pytest.raises(ValueError, match=r"Unrecognized `reduce_op` for `BaguaStrategy`: "):
        BaguaStrategy().reduce(torch.ones(1), reduce_op=op)


@on_ranks("pair")
def test_reduce_in_a_group() -> None:
    strategy = _strategy()
    rank = strategy.global_rank
    alone = [dist.new_group([member]) for member in (0, 1)]
    for op, expected in (("mean", 3.0 + rank), ("sum", 3.0 + rank)):
        tensor = torch.tensor([3.0 + rank])
        assert strategy.reduce(tensor, group=alone[rank], reduce_op=op) is tensor
        assert tensor.item() == expected
    # In the other's group this process is not, and has nothing to wait for.
    outside = torch.tensor([3.0 + rank])
    assert strategy.reduce(outside, alone[1 - rank], "sum") is outside
    assert outside.item() == 3.0 + rank
    both = dist.new_group([1, 0], backend="gloo")
    assert strategy.reduce(torch.tensor([3.0 + rank]), group=both).item() == 3.5
    assert strategy.reduce(torch.tensor([-3 - rank]), group=both).item() == -3
    assert strategy.reduce(torch.tensor([3 + rank]), both, "sum").item() == 7
    for group in (*alone, both):
        if dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)


def test_reduce_leaves_other_objects_alone() -> None:
    strategy = BaguaStrategy()
    assert strategy.reduce({"a": 1}, group=object(), reduce_op="nope") == {"a": 1}
    alone = torch.ones(1)
    assert strategy.reduce(alone, None, "sum") is alone


class _Logs(runs.Module):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        rank = float(self.global_rank)
        for fx in ("min", "max", "sum", "mean"):
            self.log(fx, rank, reduce_fx=fx, sync_dist=True, on_step=False, on_epoch=True)
        return super().training_step(batch, index)


@on_ranks("pair")
def test_what_lightning_logs_is_reduced_in_every_way() -> None:
    trainer = runs.quiet_trainer("bagua", limit_train_batches=1)
    trainer.fit(_Logs(), runs.loader())
    logged = {fx: trainer.logged_metrics[fx].item() for fx in ("min", "max", "sum", "mean")}  # type: ignore[union-attr]
    assert logged == {"min": 0.0, "max": 1.0, "sum": 1.0, "mean": 0.5}


@on_ranks("pair")
def test_barrier_and_broadcast() -> None:
    strategy = _strategy()
    strategy.barrier("here")
    sent = {"rank": strategy.global_rank, "tensor": torch.full((2,), float(strategy.global_rank))}
    for src in (0, 1):
        got = strategy.broadcast(sent, src)
        assert (got["rank"], got["tensor"].tolist()) == (src, [src, src])
    assert strategy.broadcast(sent)["rank"] == 0


def test_without_a_process_group_nothing_is_waited_for() -> None:
    strategy = BaguaStrategy()
    strategy.barrier()
    assert strategy.broadcast("it") == "it"


@on_ranks("pair")
def test_callback_says_what_it_needs(tmp_path: Path) -> None:
    folder = str(tmp_path)
    trainer = runs.quiet_trainer("ddp", callbacks=[BaguaStatsCallback()], logger=CSVLogger(folder))
    with pytest.raises(MisconfigurationException, match="needs Trainer"):
        trainer.fit(runs.Module(), runs.loader())
    with pytest.raises(MisconfigurationException, match="logger=False"):
        runs.quiet_trainer("bagua", callbacks=[BaguaStatsCallback()]).fit(runs.Module(), runs.loader())


def test_a_lightning_of_another_interface_is_refused() -> None:
    check_version("lightning", "2.0.0")
    with pytest.raises(ImportError, match=r"^bagua\.lightning needs lightning 2\.0 or later, got version 1\.9\.5$"):
        check_version("lightning", "1.9.5")


def test_either_package_has_a_strategy_of_its_own_classes() -> None:
    other = importlib.import_module("bagua.pytorch_lightning")
    strategies = importlib.import_module("pytorch_lightning.strategies")
    assert issubclass(other.BaguaStrategy, strategies.DDPStrategy)
    assert not issubclass(other.BaguaStrategy, DDPStrategy)
    assert strategies.StrategyRegistry["bagua_bytegrad"]["strategy"] is other.BaguaStrategy
    assert StrategyRegistry["bagua_bytegrad"]["strategy"] is BaguaStrategy
