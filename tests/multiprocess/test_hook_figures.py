# SPDX-License-Identifier: Apache-2.0
"""handle.stats() and what is written of it."""

from typing import Any

import bagua
import pytest
from hooked_models import loss_of, perceptron
from hooked_trainings import SECONDS, hooked, train_step
from ranks import Pools, on_ranks
from reference import for_each
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.any_device


class SummaryWriter:
    """Takes what TensorBoard's does."""

    def __init__(self) -> None:
        self.points: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        assert global_step is not None
        self.points.append((tag, float(scalar_value), global_step))


class Run:
    """Takes what a run of W&B does."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int | None, bool | None]] = []

    def log(self, data: dict[str, float], step: int | None = None, commit: bool | None = None) -> None:
        self.logged.append((dict(data), step, commit))


@on_ranks(2, timeout=SECONDS)
@for_each(bagua.available_algorithms())
def test_figures_are_written_for_the_steps_since_the_last_time(algorithm: str) -> None:
    trained, writer, run = hooked(algorithm), SummaryWriter(), Run()
    trained.handle.log_to(writer)
    assert writer.points == [], "there has been no step"
    for number in range(4):
        train_step(trained, number)
    before = trained.handle.stats()
    trained.handle.log_to(writer)
    assert {step for _, _, step in writer.points} == {4}
    figures = {tag: figure for tag, figure, _ in writer.points}
    assert figures["bagua/wire_bytes_per_step"] == before["wire_bytes"] / 4
    assert figures["bagua/rounds"] == before["rounds"]
    assert {f"bagua/seconds_per_step/{stage}" for stage in before["seconds"]} <= figures.keys()
    trained.handle.log_to(run)
    assert run.logged == [], "there has been no step since"
    train_step(trained, 4)
    now = trained.handle.stats()
    trained.handle.log_to(run)
    train_step(trained, 5)
    trained.handle.log_to(run, step=17)
    # One goes with the next point of the user's own, the other where the user says.
    assert [(step, commit) for _, step, commit in run.logged] == [(None, False), (17, None)]
    assert run.logged[0][0]["bagua/wire_bytes_per_step"] >= now["wire_bytes"] - before["wire_bytes"]
    with pytest.raises(TypeError, match=r"add_scalar.*got list"):
        trained.handle.log_to([])
    trained.handle.remove()


@on_ranks(2, timeout=SECONDS)
@for_each(bagua.available_algorithms())
def test_figures_begin_again_after_a_reset(algorithm: str) -> None:
    trained = hooked(algorithm)
    for number in range(3):
        train_step(trained, number)
        if number == 0:  # after as many steps as there are when the next figures are written
            trained.handle.log_to(SummaryWriter())
    trained.handle.synchronize()  # nothing is under way
    # The last counts since connections were opened, the others tell what is there now.
    names = ("algorithm", "state_bytes", "memory", "guard", "line")
    kept = {key: trained.handle.stats()[key] for key in names}  # type: ignore[literal-required]
    trained.handle.reset()
    stats: Any = trained.handle.stats()
    assert {key: stats.pop(key) for key in kept} == kept
    assert not any(stats.values()), stats
    writer = SummaryWriter()
    train_step(trained, 3)
    trained.handle.log_to(writer)
    assert {step for _, _, step in writer.points} == {4}, "training goes on where it was"
    assert trained.handle.stats()["steps"] == 1
    trained.handle.remove()


def _printed() -> str:
    ddp = DDP(perceptron())
    handle = bagua.register_comm_hook(ddp, "bytegrad", hierarchical=False, guard=None)
    for number in range(3):
        loss_of(ddp, number).backward()
    assert str(handle).startswith(repr(handle))
    return str(handle)


def test_a_handle_prints_its_figures(rank_pools: Pools) -> None:
    text = rank_pools[2].run(_printed, timeout=SECONDS)[0]
    bytes_of_gradients = 3 * 4 * sum(p.numel() for p in perceptron().parameters())
    assert "bytegrad(average=True, codec='int8', guard=None, hierarchical=False, start_step=0)" in text
    assert "3 steps, " in text
    assert f"{bytes_of_gradients:,} bytes to communicate" in text
    assert "(27%): " in text, text
    assert "between hosts" in text
    assert "compress 0." in text
