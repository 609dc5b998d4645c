# SPDX-License-Identifier: Apache-2.0
"""Ranks come and go, and the same process group, model and hook go on: c10d's reconfigure."""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from holdings import holdings, wait_for
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from trouble import TRANSPORTS, die, store

SIZE = 3
LAST = SIZE - 1
pytestmark = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="torch has reconfigure from 2.14 on; before, init_process_group refuses"
)
EVERYWHERE = pytest.mark.parametrize("transport", TRANSPORTS)


class _Members:
    """A group that each rank makes alone, and the handles of all."""

    def __init__(self) -> None:
        self.me, size, shared = dist.get_rank(), dist.get_world_size(), store()
        dist.destroy_process_group()
        dist.init_process_group(
            "bagua",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=30),
            enable_reconfigure=True,
        )
        self.shared = shared
        self._number = 0
        shared.set(f"handle/{self.me}", dist._get_reconfigure_handle())
        self.handles = [shared.get(f"handle/{rank}").decode() for rank in range(size)]

    def become(self, *who: int, seconds: float = 30.0, unordered: bool = False) -> None:
        """Make the group consist of these; the same calls on all of them."""
        self._number += 1
        self.reconfigure([self.handles[rank] for rank in who], (self._number, *who), seconds, unordered=unordered)

    def reconfigure(self, handles: Sequence[str], uuid: object, seconds: float, *, unordered: bool = False) -> None:
        given: Any = set(handles) if unordered else list(handles)
        dist._reconfigure(hash(uuid) % 2**31, given, timeout=timedelta(seconds=seconds)).wait()

    def wait_for_all(self, name: str, size: int = SIZE) -> None:
        self.shared.add(name, 1)
        while self.shared.add(name, 0) < size:
            pass


def _sum() -> tuple[int, int, float]:
    """Return rank, size, and what an all-reduce of 10 to the power of the ranks says."""
    tensor = torch.full((5,), 10.0 ** dist.get_rank())
    dist.all_reduce(tensor)
    return dist.get_rank(), dist.get_world_size(), tensor[0].item()


def _held() -> list[int]:
    """Count threads, files, ports, segments and mappings."""
    return [len(kind) for kind in holdings()]


def _change_often() -> list[Any]:
    members = _Members()
    assert dist._supports_reconfigure()
    with pytest.raises(RuntimeError, match=r"no members before the first reconfigure\(\)"):
        dist.barrier()
    seen: list[Any] = []
    members.become(0, 1, 2)
    seen.append(_sum())
    members.become(2, 0, 1)
    seen.append(_sum())
    members.become(2, 1, 0, unordered=True)
    seen.append(_sum())
    members.wait_for_all("no operation is under way, which an abort would end")
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    assert backend._get_sequence_number_for_group() == 1  # counted from the last change
    backend.abort()
    with pytest.raises(RuntimeError, match="was aborted"):
        dist.barrier()
    if members.me != LAST:
        members.become(1, 0)
        seen.append(_sum())
        with pytest.raises(RuntimeError, match="bagua"):
            members.become(1, 0, LAST, seconds=2.0)
        seen.append(_sum())  # in the group as it was
    else:
        members._number += 2
        members.become(LAST)
        seen.append(_sum())
        backend.abort()  # alone: an abort of another member is an error
        assert backend.get_error() == type(backend.get_error()).SUCCESS
    members.wait_for_all("apart")
    members._number = 10
    members.become(0, 1, 2)
    seen.append(_sum())
    members.become(1, 2, 0)
    _sum()
    before = _held()
    for _ in range(4):
        members.become(1, 2, 0)
        _sum()
    # A connection may be opened late; what four changes leave behind would be more.
    assert wait_for(lambda: all(now < then + 3 for now, then in zip(_held(), before, strict=True))), (before, _held())
    dist.destroy_process_group()
    return seen


@EVERYWHERE
def test_a_group_changes_its_members_in_any_order_and_after_an_abort_or_a_failure(transport: str) -> None:
    results = run_ranks(SIZE, _change_often, env=TRANSPORTS[transport])
    for me, seen in enumerate(results):
        assert seen[:3] == [(me, 3, 111.0), ((2, 0, 1).index(me), 3, 111.0), seen[2]]
        assert seen[2][1:] == (3, 111.0)
        assert seen[3:-1] == ([(0, 1, 1.0)] if me == LAST else [(1 - me, 2, 11.0)] * 2)
        assert seen[-1] == (me, 3, 111.0)
    assert {seen[2][0] for seen in results} == {0, 1, 2}


def _refuse() -> None:
    members = _Members()
    own, other = members.handles[members.me], members.handles[1 - members.me]
    wrong: Mapping[str, tuple[Sequence[str], type[Exception]]] = {
        "is not among the 1 given": ([other], ValueError),
        "comes more than once": ([own, own], ValueError),
        "at least one handle": ([], ValueError),
        "is not the reconfigure handle": ([own, "gloo:0:-1:0:10.0.0.1:29500"], ValueError),
    }
    for message, (handles, kind) in wrong.items():
        with pytest.raises(kind, match=message):
            members.reconfigure(handles, message, 5.0)
    members.become(members.me)
    members._number = 0
    with pytest.raises(RuntimeError, match="already used"):
        members.become(members.me)
    dist.destroy_process_group()


def test_handles_that_make_no_group_are_refused_and_so_is_a_uuid_that_was_used() -> None:
    run_ranks(2, _refuse)


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


class _Training:
    """A model with a hook, made in a world of one, as a replica that may join others has to."""

    def __init__(self, members: _Members, register: Callable[[DDP, torch.optim.Optimizer], Any]) -> None:
        members.become(members.me)
        self.ddp = DDP(_model(), bucket_cap_mb=0.001)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), 0.05)
        self.handle = register(self.ddp, self.optimizer)
        for _ in range(2):  # DDP lays its buckets out after the first
            self.backward(0)
        self.optimizer.zero_grad()

    def backward(self, number: int) -> None:
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        self.optimizer.zero_grad()
        self.ddp(torch.randn(4, 8, generator=generator)).square().mean().backward()

    def step(self, number: int) -> None:
        self.backward(number)
        self.optimizer.step()

    def heal(self) -> None:
        """Take what the first member has."""
        for parameter in self.ddp.parameters():
            dist.broadcast(parameter.data, 0)

    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.ddp.parameters()])


HOOKS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "bytegrad": {"hierarchical": False},
    "quantized_allreduce": {"hierarchical": False},
    "powersgd": {"hierarchical": False, "start_step": 2, "min_compression": 1e-6},
}


def _lose_one(algorithm: str) -> tuple[Tensor, list[int]]:
    members = _Members()
    training = _Training(members, lambda ddp, _: bagua.register_comm_hook(ddp, algorithm, **HOOKS[algorithm]))
    sizes = []
    # The first member, in whose store the others meet, is the one that goes.
    members.become(LAST, 0, 1)
    training.heal()
    for number in range(4):
        training.step(number)
    if members.me == LAST:
        first = next(training.ddp.parameters())
        first.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError):
        training.step(4)
    members.become(0, 1)
    for number in range(5, 9):
        training.step(number)
        sizes.append(dist.get_world_size())
    training.handle.remove()
    training.step(9)
    return training.weights(), sizes


@pytest.mark.parametrize("algorithm", HOOKS)
def test_survivors_go_on_with_the_same_model_and_hook_when_the_member_that_all_met_at_dies(algorithm: str) -> None:
    transport = "in-host" if algorithm == "powersgd" else "between-hosts"
    results = run_ranks(SIZE, _lose_one, algorithm, env=TRANSPORTS[transport], dying={LAST})
    (first, sizes), (second, _) = results[:2]
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert sizes == [2] * 4


def _grow(algorithm: str) -> tuple[Tensor, list[float]]:
    members = _Members()
    training = _Training(members, lambda ddp, _: bagua.register_comm_hook(ddp, algorithm, **HOOKS[algorithm]))
    if members.me != LAST:
        members.become(0, 1)
        training.heal()
        for number in range(3):
            training.step(number)
    else:
        members._number += 1
    members.become(0, 1, LAST)
    training.heal()
    for number in range(3, 7):
        training.step(number)
    # What a mean over three is, which all have.
    training.backward(7)
    gradient = next(training.ddp.parameters()).grad
    assert gradient is not None
    own = torch.cat([p.grad.flatten() for p in training.ddp.parameters() if p.grad is not None])
    return training.weights(), own[:4].tolist()


@pytest.mark.parametrize("algorithm", ["bytegrad", "quantized_allreduce"])
def test_a_newcomer_trains_on_with_the_others(algorithm: str) -> None:
    results = run_ranks(SIZE, _grow, algorithm, env=TRANSPORTS["between-hosts"])
    for weights, gradient in results[1:]:
        assert torch.equal(weights, results[0][0])
        assert gradient == results[0][1]


def _remembers_the_optimizer() -> set[str]:
    members = _Members()
    options = {"codec": "2bit", "hierarchical": False}
    training = _Training(
        members, lambda ddp, it: bagua.register_comm_hook(ddp, "quantized_allreduce", optimizer=it, **options)
    )
    members.become(0, 1, LAST)
    training.heal()
    for number in range(2):
        training.step(number)
    return {name.split(".")[1] for name in training.handle.state_dict()["state"]}


def test_among_other_members_error_feedback_goes_by_the_same_optimizer() -> None:
    assert run_ranks(SIZE, _remembers_the_optimizer, env=TRANSPORTS["in-host"]) == [{"2bit"}] * SIZE


def _join_with_another() -> None:
    members = _Members()
    name = "bytegrad" if members.me == LAST else "gradient_allreduce"
    training = _Training(members, lambda ddp, _: bagua.register_comm_hook(ddp, name))
    members.become(0, 1, 2)
    training.heal()
    with pytest.raises(ValueError, match="registered another algorithm or other options than rank 0"):
        training.backward(0)


def test_members_whose_hooks_differ_are_told_at_their_first_bucket() -> None:
    run_ranks(SIZE, _join_with_another)


def _refuse_to_follow() -> None:
    members = _Members()
    training = _Training(
        members, lambda ddp, optimizer: bagua.register_comm_hook(ddp, "local_sgd", optimizer=optimizer, sync_every=2)
    )
    members.become(0, 1, 2)
    training.heal()
    with pytest.raises(RuntimeError, match=r"'local_sgd' cannot go on .* call handle.remove\(\) and register it again"):
        training.backward(0)
    training.handle.remove()
    training.handle = bagua.register_comm_hook(training.ddp, "local_sgd", optimizer=training.optimizer, sync_every=2)
    for number in range(4):
        training.step(number)
    everywhere = [torch.empty(0)] * SIZE
    dist.all_gather_object(everywhere, training.weights())
    assert all(torch.equal(weights, everywhere[0]) for weights in everywhere)
    training.handle.remove()


def test_an_algorithm_that_knows_its_peers_says_how_to_go_on() -> None:
    run_ranks(SIZE, _refuse_to_follow)


def _shrink() -> tuple[int, int, float]:
    if dist.get_rank() == 1:
        die()
    dist.distributed_c10d.shrink_group([1], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    return _sum()


def test_shrink_group_leaves_out_the_dead() -> None:
    results = run_ranks(SIZE, _shrink, dying={1})
    assert results[0] == (0, 2, 11.0)
    assert results[2] == (1, 2, 11.0)
