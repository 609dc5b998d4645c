# SPDX-License-Identifier: Apache-2.0
"""The handle that register_comm_hook() returns: figures, checkpoints, removal."""

import copy
import io
import pickle
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from hooked_models import Leaves, loss_of, perceptron, random_gradient
from ranks import RankPool
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.any_device


def _figures(algorithm: str, options: dict[str, Any], length: int, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    ddp = DDP(Leaves(length))
    handle = bagua.register_comm_hook(ddp, algorithm, **options)
    before = handle.stats()
    for step in range(steps):
        ddp([random_gradient(length, dist.get_rank(), step)]).backward()
    assert handle.algorithm == algorithm
    assert handle.options == {"hierarchical": algorithm == "bytegrad", "average": True, **options}
    assert algorithm in repr(handle)
    return before, handle.stats()


def test_figures_count_steps_and_bytes(peers: RankPool) -> None:
    length, steps, size = 40_000, 3, peers.world_size
    full = 2 * (size - 1) / size * 4 * length * steps  # what an allreduce of float32 takes
    for algorithm, options, expected in [
        ("gradient_allreduce", {}, full),
        ("bytegrad", {"hierarchical": False}, full / 4),
        ("bytegrad", {"hierarchical": True}, full),  # one host
    ]:
        for before, after in peers.run(_figures, algorithm, options, length, steps):
            assert (before["steps"], before["buckets"], before["logical_bytes"], before["wire_bytes"]) == (0, 0, 0, 0)
            assert after["algorithm"] == algorithm
            assert (after["steps"], after["buckets"]) == (steps, steps)
            assert after["logical_bytes"] == 4 * length * steps
            assert after["wire_bytes"] == pytest.approx(expected, rel=0.01)
            assert all(seconds > 0 for seconds in after["seconds"].values())
            assert ("compress" in after["seconds"]) == (options.get("hierarchical") is False)


def _checkpoint() -> None:
    def hooked(name: str, **options: Any) -> bagua.Handle:
        return bagua.register_comm_hook(DDP(Leaves(3)), name, **options)

    coded = hooked("bytegrad", hierarchical=False)
    file = io.BytesIO()
    torch.save(coded.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    hooked("bytegrad", hierarchical=False).load_state_dict(state)
    with pytest.raises(ValueError, match="hierarchical"):
        hooked("bytegrad", hierarchical=True).load_state_dict(state)
    with pytest.raises(ValueError, match=r"bytegrad.*gradient_allreduce"):
        hooked("gradient_allreduce").load_state_dict(state)
    with pytest.raises(ValueError, match="algorithm"):
        coded.load_state_dict({})


def test_a_checkpoint_fits_the_same_algorithm_and_options_only(rank_pools: dict[int, RankPool]) -> None:
    rank_pools[2].run(_checkpoint)


def _remove(after_steps: int) -> None:
    rank, length = dist.get_rank(), 1003
    ddp = DDP(Leaves(length))
    handle = bagua.register_comm_hook(ddp, "bytegrad", hierarchical=False)
    for step in range(after_steps + 2):
        if step == after_steps:
            handle.remove()
        ddp.zero_grad()
        ddp([random_gradient(length, rank, step)]).backward()
        exact = (random_gradient(length, 0, step) + random_gradient(length, 1, step)) / 2
        assert torch.equal(ddp.module.leaves[0].grad, exact) == (step >= after_steps), f"{step=}"
    handle.remove()  # once more changes nothing


@pytest.mark.parametrize("after_steps", [0, 2])
def test_a_removed_algorithm_leaves_the_plain_mean(rank_pools: dict[int, RankPool], after_steps: int) -> None:
    rank_pools[2].run(_remove, after_steps)


def _background_control(name: str) -> None:
    handle = bagua.register_comm_hook(DDP(Leaves(3)), name)
    for control in (handle.abort, handle.resume):
        with pytest.raises(RuntimeError, match=f"background.*'{name}'"):
            control()


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad"])
def test_algorithms_without_background_work_cannot_be_aborted(rank_pools: dict[int, RankPool], name: str) -> None:
    rank_pools[1].run(_background_control, name)


def _copy_hooked() -> None:
    registered, two_arguments = DDP(perceptron()), DDP(perceptron())
    handle = bagua.register_comm_hook(registered, "bytegrad")
    two_arguments.register_comm_hook(*bagua.comm_hook("bytegrad"))
    for ddp in (registered, two_arguments):
        for duplicate in (pickle.dumps, copy.deepcopy, lambda model: torch.save(model, io.BytesIO())):
            with pytest.raises(TypeError, match=r"cannot be pickled or deep-copied.*module\.state_dict"):
                duplicate(ddp)
        copy.deepcopy(ddp.module)
        pickle.dumps(ddp.module.state_dict())
        loss_of(ddp, 0).backward()  # still works
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(handle)


def test_a_hooked_model_cannot_be_copied_without_its_hook(rank_pools: dict[int, RankPool]) -> None:
    rank_pools[1].run(_copy_hooked)
