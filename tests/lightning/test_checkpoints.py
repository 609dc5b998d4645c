# SPDX-License-Identifier: Apache-2.0
"""A run that continues from a checkpoint gives the bits that a loop over DDP gives, with every algorithm."""

import warnings
from pathlib import Path
from typing import Any

import lightning_runs as runs
import pytest
import torch
import torch.distributed as dist
from bagua.lightning import BaguaStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import on_ranks


@pytest.mark.parametrize("algorithm", runs.DETERMINISTIC)
@on_ranks("pair")
def test_resume_from_a_checkpoint_saved_after_training(tmp_path: Path, algorithm: str) -> None:
    path = str(tmp_path / "end.ckpt")
    runs.fit(algorithm, max_epochs=1).save_checkpoint(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the checkpoint ")
        continued = runs.fit(algorithm, max_epochs=2, ckpt_path=path)
    assert continued.global_step == 2 * runs.STEPS_PER_EPOCH
    weights = runs.weights_of(continued.lightning_module)
    runs.assert_same_bits(weights, runs.weights_by_hand(algorithm, epochs=2))
    first, second = runs.everyones(weights)
    are_same = all(torch.equal(first[name], second[name]) for name in first)
    assert are_same == (algorithm not in runs.WEIGHTS_DIFFER)


class _Tested(runs.Module):
    def test_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.loss(batch)


@pytest.mark.parametrize("algorithm", ["low_precision_decentralized", "powersgd", "diloco"])
@on_ranks("pair")
def test_a_test_between_training_and_saving_changes_nothing(tmp_path: Path, algorithm: str) -> None:
    path = str(tmp_path / "tested.ckpt")
    trainer = runs.fit(algorithm, _Tested(algorithm))
    for _ in range(2):
        trainer.test(trainer.lightning_module, runs.loader(shuffle=False), verbose=False)
    trainer.save_checkpoint(path)
    continued = runs.fit(algorithm, max_epochs=2, ckpt_path=path)
    runs.assert_same_bits(runs.weights_of(continued.lightning_module), runs.weights_by_hand(algorithm, epochs=2))


@pytest.mark.parametrize(
    ("algorithm", "how", "holds"),
    [("decentralized", "path", False), ("bytegrad", "path", True), ("bytegrad", "module", False)],
)
@on_ranks("pair")
def test_a_state_is_not_saved_with_weights_that_it_does_not_fit(
    tmp_path: Path, algorithm: str, how: str, holds: bool
) -> None:
    first, second = (str(tmp_path / f"{name}.ckpt") for name in ("first", "second"))
    trainer = runs.fit(algorithm, _Tested(algorithm))
    trainer.save_checkpoint(first)
    tested: dict[str, Any] = {"ckpt_path": first} if how == "path" else {"model": _Tested(algorithm)}
    trainer.test(dataloaders=runs.loader(shuffle=False), verbose=False, **tested)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.save_checkpoint(second)
    warned = any("holds no state of algorithm 'decentralized'" in str(warning.message) for warning in caught)
    assert warned == (algorithm == "decentralized" and dist.get_rank() == 0)
    dist.barrier()
    assert ("bagua" in torch.load(second, weights_only=True)) == holds


class _SavesAPart(runs.Module):
    """Leaves its first layer, which is frozen, out of checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.network[0].requires_grad_(False)
        self.strict_loading = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        whole = super().state_dict(*args, **kwargs)
        return {name: value for name, value in whole.items() if not name.startswith("network.0.")}


@on_ranks("pair")
def test_a_module_that_saves_a_part_of_itself_continues(tmp_path: Path) -> None:
    path = str(tmp_path / "part.ckpt")
    runs.fit("bytegrad", _SavesAPart(), max_epochs=1).save_checkpoint(path)
    continued = runs.fit("bytegrad", _SavesAPart(), max_epochs=2, ckpt_path=path)
    assert continued.global_step == 2 * runs.STEPS_PER_EPOCH


@pytest.mark.parametrize("algorithm", ["decentralized", "qadam", "powersgd", "diloco"])
@on_ranks("pair")
def test_resume_from_a_checkpoint_saved_during_training(tmp_path: Path, algorithm: str) -> None:
    folder = str(tmp_path)
    saves = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    whole = runs.fit(algorithm, max_epochs=3, enable_checkpointing=True, callbacks=[saves])
    continued = runs.fit(algorithm, max_epochs=3, ckpt_path=f"{folder}/epoch=1.ckpt")
    assert len(continued.lightning_module.losses) == runs.STEPS_PER_EPOCH  # type: ignore[arg-type]
    expected = runs.weights_by_hand(algorithm, epochs=3)
    for trainer in (whole, continued):
        runs.assert_same_bits(runs.weights_of(trainer.lightning_module), expected)


@on_ranks("pair")
def test_checkpoint_holds_weights_of_every_rank_where_they_differ(tmp_path: Path) -> None:
    path = str(tmp_path / "low.ckpt")
    trainer = runs.fit("low_precision_decentralized")
    trainer.save_checkpoint(path)
    weights = runs.everyones(runs.weights_of(trainer.lightning_module))
    checkpoint = torch.load(path, weights_only=True)
    runs.assert_same_bits(checkpoint["state_dict"], weights[0])
    first, second = checkpoint["bagua"]["ranks"]
    assert first.keys() == {"state", "layout", "step", "guard"}
    runs.assert_same_bits(second["state_dict"], weights[1])
    assert any(name.startswith("replica.") for name in second["state"])


@on_ranks("pair")
def test_checkpoint_holds_one_copy_of_weights_that_are_the_same(tmp_path: Path) -> None:
    path = str(tmp_path / "qadam.ckpt")
    runs.fit("qadam").save_checkpoint(path)
    ranks = torch.load(path, weights_only=True)["bagua"]["ranks"]
    assert [rank.keys() for rank in ranks] == [{"state", "layout", "step", "guard"}] * 2


class _Start(runs.Module):
    def on_train_start(self) -> None:
        self.start = runs.weights_of(self)


@on_ranks("pair")
def test_save_every_rank_false_holds_rank_0_only(tmp_path: Path) -> None:
    path = str(tmp_path / "first.ckpt")
    strategy = BaguaStrategy("decentralized", save_every_rank=False, hierarchical=False)
    trainer = runs.quiet_trainer(strategy)
    trainer.fit(runs.Module(), runs.loader())
    trainer.save_checkpoint(path)
    dist.barrier()
    checkpoint = torch.load(path, weights_only=True)
    assert "bagua" not in checkpoint
    continued = _Start()
    runs.fit("decentralized", continued, max_epochs=2, ckpt_path=path)
    runs.assert_same_bits(continued.start, checkpoint["state_dict"])
    assert len(continued.losses) == runs.STEPS_PER_EPOCH


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("bytegrad", "was written with algorithm 'decentralized'"),
        ("decentralized", "was written with the options {"),
        ("ranks", "was written by 1 ranks"),
        ("entry", "holds no state of an algorithm"),
    ],
)
@on_ranks("pair")
def test_another_run_starts_from_rank_0_with_a_warning(tmp_path: Path, how: str, expected: str) -> None:
    path = str(tmp_path / "other.ckpt")
    runs.fit("decentralized").save_checkpoint(path)
    if how in ("ranks", "entry") and dist.get_rank() == 0:
        checkpoint = torch.load(path, weights_only=True)
        if how == "entry":
            del checkpoint["bagua"]
        else:
            del checkpoint["bagua"]["ranks"][1]
        torch.save(checkpoint, path)
    dist.barrier()
    name = "decentralized" if how in ("ranks", "entry") else how
    options = {"communication_interval": 3} if how == "decentralized" else runs.DETERMINISTIC[name]
    continued = _Start(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = runs.quiet_trainer(BaguaStrategy(name, **options), max_epochs=2)
        trainer.fit(continued, runs.loader(), ckpt_path=path)
    texts = [str(warning.message) for warning in caught if "starts afresh" in str(warning.message)]
    assert len(texts) == (dist.get_rank() == 0)
    assert all(expected in text for text in texts)
    runs.assert_same_bits(continued.start, torch.load(path, weights_only=True)["state_dict"])
    assert len(continued.losses) == runs.STEPS_PER_EPOCH


class _Rounds(runs.Module):
    rounds = 0

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("loss", self.loss(batch))

    def on_train_end(self) -> None:
        self.rounds = self.trainer.strategy.handle.stats()["rounds"]  # type: ignore[attr-defined]


@on_ranks("pair")
def test_async_communicates_again_after_a_checkpoint_written_in_a_pause(tmp_path: Path) -> None:
    folder = str(tmp_path)
    # Written while validation has communication paused, and read where no validation ends a pause.
    saves = ModelCheckpoint(folder, filename="paused", save_on_train_epoch_end=False)
    strategy = BaguaStrategy("async", sync_interval_ms=1)
    trainer = runs.quiet_trainer(strategy, enable_checkpointing=True, callbacks=[saves])
    trainer.fit(_Rounds(), runs.loader(), runs.loader(shuffle=False))
    path = f"{folder}/paused.ckpt"
    dist.barrier()
    state = torch.load(path, weights_only=True)["bagua"]["ranks"][1]["state"]
    assert state["is_paused"].item() == 1
    continued = _Rounds()
    trainer = runs.quiet_trainer(BaguaStrategy("async", sync_interval_ms=1), max_epochs=4)
    trainer.fit(continued, runs.loader(), ckpt_path=path)
    assert continued.rounds > 0


@on_ranks("pair")
def test_checkpoints_are_exchanged_with_stock_ddp(tmp_path: Path) -> None:
    path = str(tmp_path / "stock.ckpt")
    trainer = runs.quiet_trainer("ddp")
    trainer.fit(runs.Module(), runs.loader())
    trainer.save_checkpoint(path)
    for algorithm, loses in (("bytegrad", False), ("powersgd", True)):
        continued = _Start()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runs.fit(algorithm, continued, max_epochs=2, ckpt_path=path)
        assert any("starts afresh" in str(one.message) for one in caught) == (loses and dist.get_rank() == 0)
        runs.assert_same_bits(continued.start, torch.load(path, weights_only=True)["state_dict"])
    # And the other way: stock DDP reads ours.
    runs.fit("bytegrad").save_checkpoint(path)
    stock = runs.quiet_trainer("ddp", max_epochs=2)
    stock.fit(runs.Module(), runs.loader(), ckpt_path=path)
    assert stock.global_step == 2 * runs.STEPS_PER_EPOCH


@on_ranks("pair")
def test_checkpoint_of_the_weights_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "weights.ckpt")
    runs.fit("decentralized").save_checkpoint(path, weights_only=True)
    assert "bagua" not in torch.load(path, weights_only=True)
