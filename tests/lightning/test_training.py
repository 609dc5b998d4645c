# SPDX-License-Identifier: Apache-2.0
"""Training with Lightning is the same training as a loop over DDP with the same algorithm, to the bit."""

import gc
import weakref
from typing import Any

import lightning_runs as runs
import pytest
import torch
import torch.distributed as dist
from bagua.lightning import BaguaStrategy
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


@pytest.mark.parametrize("algorithm", ["qadam", "local_sgd"])
@on_ranks("pair")
def test_gradients_accumulate_without_communication(algorithm: str) -> None:
    trainer = runs.fit(algorithm, accumulate_grad_batches=2)
    assert trainer.global_step == runs.STEPS_PER_EPOCH // 2
    expected = runs.weights_by_hand(algorithm, accumulate=2)
    runs.assert_same_bits(runs.weights_of(trainer.lightning_module), expected)


class _Manual(runs.Module):
    automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


@pytest.mark.parametrize("algorithm", ["qadam", "diloco"])
@on_ranks("pair")
def test_manual_optimisation_gives_the_same_bits(algorithm: str) -> None:
    manual = runs.fit(algorithm, _Manual(algorithm), max_epochs=2).lightning_module
    runs.assert_same_bits(runs.weights_of(manual), runs.weights_by_hand(algorithm, epochs=2))


class _TwoOptimizers(runs.Module):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(9, 3)

    def training_step(self, batch: list[Tensor], index: int) -> None:  # type: ignore[override]
        x, y = batch
        for optimizer, part in zip(self.optimizers(), (self.network, self.other), strict=True):  # type: ignore[arg-type]
            self.toggle_optimizer(optimizer)
            loss = (part(x) - y).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.network, self.other)]


@on_ranks("pair")
def test_two_optimizers_take_turns() -> None:
    strategy = BaguaStrategy("bytegrad", find_unused_parameters=True, hierarchical=False)
    module = _TwoOptimizers()
    before = runs.weights_of(module)
    runs.quiet_trainer(strategy).fit(module, runs.loader())
    after = runs.weights_of(module)
    assert not any(torch.equal(before[name], after[name]) for name in before)
    first, second = runs.everyones(after)
    runs.assert_same_bits(first, second)


class _DtypeOfActivations(runs.Module):
    dtypes: set[torch.dtype]

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        out = self(x)
        self.dtypes = {out.dtype}
        loss: Tensor = (out - y).float().square().mean()
        return loss


@pytest.mark.parametrize(
    ("precision", "activations", "weights", "algorithm"),
    [
        ("bf16-mixed", torch.bfloat16, torch.float32, "qadam"),
        ("bf16-true", torch.bfloat16, torch.bfloat16, "low_precision_decentralized"),
        ("16-true", torch.float16, torch.float16, "bytegrad"),
    ],
    ids=str,
)
@on_ranks("pair")
def test_precisions_of_lightning(
    precision: Any, activations: torch.dtype, weights: torch.dtype, algorithm: str
) -> None:
    module = _DtypeOfActivations(algorithm)
    runs.fit(algorithm, module, precision=precision, max_epochs=4)
    assert module.dtypes == {activations}
    assert {p.dtype for p in module.parameters()} == {weights}
    early, late = sum(module.losses[:8]), sum(module.losses[-8:])
    assert late < early
    if algorithm not in runs.WEIGHTS_DIFFER:
        first, second = runs.everyones(runs.weights_of(module))
        runs.assert_same_bits(first, second)


@on_ranks("pair")
def test_sync_batchnorm_is_applied_before_the_model_is_wrapped() -> None:
    trainer = runs.quiet_trainer(BaguaStrategy("bytegrad"), sync_batchnorm=True)
    # torch has it for CUDA only: the refusal shows that the layers were converted, and before DDP wrapped the model.
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        trainer.fit(runs.Module(norm=True), runs.loader())


@on_ranks("pair")
def test_stock_ddp_strategy_on_our_backend() -> None:
    trainer = runs.quiet_trainer(DDPStrategy(process_group_backend="bagua"))
    module = runs.Module()
    trainer.fit(module, runs.loader())
    assert dist.get_backend() == "bagua"
    # Of two ranks: halves are exact, whoever takes them.
    runs.assert_same_bits(runs.weights_of(module), runs.weights_by_hand("gradient_allreduce"))


class _NotesHooks(runs.Module):
    def on_train_start(self) -> None:
        hook = self.trainer.strategy.handle._hook  # type: ignore[attr-defined]
        self.hooks = [*getattr(self, "hooks", ()), weakref.ref(hook)]


@pytest.mark.parametrize("algorithm", ["local_sgd", "decentralized"])
@on_ranks("pair")
def test_a_module_that_is_fitted_again_keeps_nothing_of_the_fits_before(algorithm: str) -> None:
    module = _NotesHooks(algorithm)
    for _ in range(2):
        runs.fit(algorithm, module)
    gc.collect()
    assert [hook() for hook in module.hooks] == [None, None]


@on_ranks("pair")
def test_a_trainer_fits_again() -> None:
    module = runs.Module("decentralized")
    trainer = runs.fit("decentralized", module)
    assert trainer.strategy.handle is None  # type: ignore[attr-defined]
    first = runs.weights_of(module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, runs.loader())
    assert trainer.global_step == 2 * runs.STEPS_PER_EPOCH
    assert not torch.equal(first["network.0.weight"], runs.weights_of(module)["network.0.weight"])


@on_ranks("pair")
def test_flatten_and_ddp_options_reach_ddp_and_teardown_unwraps() -> None:
    seen: list[DDP] = []
    module = runs.Module()
    module.on_train_start = lambda: seen.append(module.trainer.strategy.model)  # type: ignore[method-assign,arg-type]
    strategy = BaguaStrategy(flatten=False, bucket_cap_mb=3, broadcast_buffers=False)
    runs.quiet_trainer(strategy).fit(module, runs.loader())
    assert (seen[0].gradient_as_bucket_view, seen[0].bucket_bytes_cap) == (False, 3 * 2**20)
    assert not seen[0].broadcast_buffers
    assert not isinstance(strategy.model, DDP)
    assert strategy.lightning_module is module


class _Validated(runs.Module):
    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)
        assert not self.network.training


@pytest.mark.parametrize("algorithm", ["low_precision_decentralized", "diloco"])
@on_ranks("pair")
def test_validation_inside_training_changes_nothing(algorithm: str) -> None:
    trainer = runs.quiet_trainer(BaguaStrategy(algorithm, **runs.DETERMINISTIC[algorithm]), val_check_interval=3)
    module = _Validated(algorithm)
    trainer.fit(module, runs.loader(), runs.loader(shuffle=False))
    runs.assert_same_bits(runs.weights_of(module), runs.weights_by_hand(algorithm))


class _Watched(runs.Module):
    """Notes its weights at the validations, and whether they change while one goes on."""

    def __init__(self) -> None:
        super().__init__("async")
        self.seen: list[dict[str, Tensor]] = []
        self.rounds = 0

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.seen.append(runs.weights_of(self))

    def on_train_batch_end(self, *_: Any) -> None:
        # Ranks at different paces, as async is for.
        torch.ops.aten.randn([200 * (1 + dist.get_rank()), 200]).square()
        self.rounds = self.trainer.strategy.handle.stats()["rounds"]  # type: ignore[attr-defined]


@on_ranks("pair")
def test_async_pauses_for_validation_and_ends_with_equal_weights() -> None:
    module = _Watched()
    strategy = BaguaStrategy("async", sync_interval_ms=1)
    # The last three steps are after the last validation.
    trainer = runs.quiet_trainer(strategy, max_epochs=3, limit_train_batches=7, val_check_interval=4)
    trainer.fit(module, runs.loader(), runs.loader(shuffle=False))
    first, second = runs.everyones(module.seen[2:])  # without the two of the sanity check
    assert len(first) == len(second) == 3 * 8
    for mine, other in zip(first, second, strict=True):
        runs.assert_same_bits(mine, other)
    assert module.rounds > 0
    first, second = runs.everyones(runs.weights_of(module))
    runs.assert_same_bits(first, second)


@on_ranks("pair")
def test_residuals_follow_the_loss_scale_of_lightning() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    strategy = BaguaStrategy("powersgd", precision_plugin=MixedPrecision("16-mixed", "cpu", scaler=scaler))
    factors: list[float] = []

    class Recorder(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            assert strategy.handle is not None
            strategy.handle.rescale = factors.append  # type: ignore[method-assign]

    runs.quiet_trainer(strategy, callbacks=[Recorder()]).fit(runs.Module(), runs.loader())
    assert factors == [2.0] * (runs.STEPS_PER_EPOCH // 3)
