# SPDX-License-Identifier: Apache-2.0
"""Ranks come and go, and the same process group, model and hook go on: c10d's reconfigure."""

import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bagua import _executors
from bagua._native import _C
from holdings import holdings, wait_for
from hooked_models import same_everywhere
from members import HOOKS, Members, Training
from ranks import on_new_ranks, run_ranks
from torch import Tensor
from trouble import TRANSPORTS, die, store

SIZE = 3
LAST = SIZE - 1
NEWCOMER = 1
pytestmark = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="torch has reconfigure from 2.14 on; before, init_process_group refuses"
)
EVERYWHERE = pytest.mark.parametrize("transport", TRANSPORTS)


def _sum() -> tuple[int, int, float]:
    """Return rank, size, and what an all-reduce of 10 to the power of the ranks says."""
    tensor = torch.full((5,), 10.0 ** dist.get_rank())
    dist.all_reduce(tensor)
    return dist.get_rank(), dist.get_world_size(), tensor[0].item()


def _held() -> list[int]:
    """Count threads, files, ports, segments and mappings."""
    return [len(kind) for kind in holdings()]


def _change_often() -> list[Any]:
    members = Members()
    assert dist._supports_reconfigure()
    assert _sum() == (0, 1, 1.0)  # alone at first
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


@on_new_ranks(1)
def test_a_group_for_several_ranks_waits_for_reconfigure() -> None:
    dist.destroy_process_group()
    dist.init_process_group("bagua", store=dist.HashStore(), rank=0, world_size=2, enable_reconfigure=True)
    with pytest.raises(RuntimeError, match=r"no members before the first reconfigure\(\)"):
        dist.barrier()


@on_new_ranks(2)
def test_handles_that_make_no_group_are_refused_and_so_is_a_uuid_that_was_used() -> None:
    members = Members()
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


# What of a state is the same on all ranks.
SHARED = ("step", "exchanges", "outer_weights", "outer_momentum")


class _Trained(NamedTuple):
    """What a rank has after it has trained with a newcomer, and after another one has died."""

    grown: Tensor
    shared: dict[str, list[float]]
    weights: Tensor
    sizes: list[int]


def _grow_and_lose_one(algorithm: str) -> _Trained:
    members = Members()
    training = Training(members, algorithm)
    if members.me != NEWCOMER:
        members.become(0, LAST)
        for number in range(5):
            training.step(number)
    else:
        members._number += 1
        with torch.no_grad():
            next(training.ddp.parameters()).fill_(7.0)
    members.become(0, NEWCOMER, LAST)
    training.heal()
    for number in range(5, 11):
        training.step(number)
    state = training.handle.state_dict()["state"]
    shared = {name: tensor.flatten().tolist() for name, tensor in state.items() if name.split(".")[0] in SHARED}
    training.handle.synchronize()
    grown = training.weights().clone()
    assert same_everywhere(grown)
    # The first member, in whose store the others meet, is the one that goes.
    members.become(LAST, 0, NEWCOMER)
    for number in range(11, 15):
        training.step(number)
    if members.me == LAST:
        first = next(training.ddp.parameters())
        first.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    # What waits for the dead rank may be a later step.
    with pytest.raises(dist.DistError):
        training.steps_until_one_fails()
    members.become(0, NEWCOMER)
    training.heal()
    sizes = []
    for number in range(15, 19):
        training.step(number)
        sizes.append(dist.get_world_size())
    # What is a mean over two then, both have.
    training.handle.remove()
    training.step(19)
    return _Trained(grown, shared, training.weights(), sizes)


@pytest.mark.parametrize("algorithm", HOOKS)
def test_the_same_model_and_hook_go_on_with_a_newcomer_and_when_the_member_that_all_met_at_dies(algorithm: str) -> None:
    transport = "in-host" if algorithm == "powersgd" else "between-hosts"
    first, other, _ = run_ranks(SIZE, _grow_and_lose_one, algorithm, env=TRANSPORTS[transport], dying={LAST})
    assert first.grown.abs().max() < 3, "the newcomer has brought weights of its own"
    if algorithm != "async":  # whose ranks count for themselves
        assert other.shared == first.shared
    # Five without the newcomer, and six with it.
    assert first.shared.get("step", [11])[0] >= 11
    if algorithm == "diloco":
        assert any(first.shared["outer_momentum.0"])
    assert torch.equal(other.weights, first.weights)
    assert first.weights.isfinite().all()
    assert first.sizes == [2] * 4


def _pause(_: Tensor) -> None:
    time.sleep(0.8)


def _lose_one_within_a_backward() -> Tensor:
    members = Members()
    training = Training(members, "qadam")
    members.become(0, 1, LAST)
    for number in range(3):
        training.step(number)
    if members.me == LAST:
        die(members.shared)
    # The next bucket meets a group that has failed already.
    slow = training.ddp.module[2].register_forward_hook(lambda *out: out[2].register_hook(_pause) and None)
    with pytest.raises(dist.DistBackendError):
        training.steps_until_one_fails()
    slow.remove()
    members.become(0, 1)
    training.heal()
    for number in range(5, 8):
        training.step(number)
    return training.weights()


def test_after_a_backward_in_which_one_bucket_failed_before_another_the_model_goes_on() -> None:
    first, second, _ = run_ranks(SIZE, _lose_one_within_a_backward, dying={LAST})
    assert torch.equal(first, second)


@on_new_ranks(SIZE)
def test_among_other_members_error_feedback_goes_by_the_same_optimizer() -> None:
    members = Members()
    training = Training(members, "quantized_allreduce")
    members.become(0, 1, LAST)
    for number in range(2):
        training.step(number)
    assert {name.split(".")[1] for name in training.handle.state_dict()["state"]} == {"2bit"}


@on_new_ranks(SIZE)
def test_members_whose_hooks_differ_are_told_at_their_first_bucket() -> None:
    members = Members()
    training = Training(members, "bytegrad" if members.me == LAST else "gradient_allreduce")
    members.become(0, 1, 2)
    with pytest.raises(ValueError, match="registered another algorithm or other options than rank 0"):
        training.backward(0)


@on_new_ranks(SIZE)
def test_where_an_algorithm_cannot_go_on_all_members_say_so_and_are_equal_once_it_is_removed() -> None:
    members = Members()
    training = Training(members, "decentralized", hierarchical=False, peer_selection_mode="shift_one")
    if members.me != LAST:
        members.become(0, 1)
        for number in range(3):
            training.step(number)
    else:
        members._number += 1
    members.become(0, 1, LAST)
    training.heal()
    for _ in range(2):
        with pytest.raises(ValueError, match="needs an even number of them, got 3"):
            training.backward(3)
    training.handle.remove()
    assert same_everywhere(training.weights())


def _fail_to_make_groups() -> tuple[Tensor, list[bool]]:
    members = Members()
    training = Training(members, "local_sgd")
    members.become(0, 1, LAST)
    fails = mock.patch.object(_executors, "private_executors_for", side_effect=dist.DistBackendError("no group"))
    with fails, pytest.raises(dist.DistBackendError, match="no group"):
        training.backward(0)
    has_to_begin = [training.handle._hook.have_members_changed]
    for number in range(4):
        training.step(number)
    has_to_begin.append(training.handle._hook.have_members_changed)
    training.handle.synchronize()
    return training.weights(), has_to_begin


def test_an_algorithm_whose_groups_could_not_be_made_makes_them_at_the_next_forward() -> None:
    results = run_ranks(SIZE, _fail_to_make_groups)
    for weights, has_to_begin in results:
        assert torch.equal(weights, results[0][0])
        assert has_to_begin == [True, False]


def _wait_in_vain() -> tuple[float, float]:
    members = Members()
    members.become(members.me)
    if members.me == 0:
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        threading.Timer(0.3, backend.abort).start()
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match=r"the group was aborted while it waited for other members"):
            members.reconfigure([members.handles[0], members.handles[1]], "waits", 60.0)
        ended = time.monotonic() - begin
        members.reconfigure([members.handles[0]], "alone", 5.0)
        members.wait_for_all("over", 2)
        return ended, _sum()[2]
    members.wait_for_all("over", 2)
    return 0.0, 1.0


def test_an_abort_ends_a_change_that_waits_for_members() -> None:
    (seconds, total), _ = run_ranks(2, _wait_in_vain)
    assert seconds < 10
    assert total == 1.0


def _abort_as_it_ends() -> list[tuple[float, bool]]:
    members = Members()
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    seen = []
    for number in range(6):

        def abort(key: str = f"begun/{number}") -> None:
            members.shared.wait([key])
            backend.abort()

        aborts = threading.Thread(target=abort)
        has_begun = True
        if members.me == 1:
            # It waits for the other, and looks now and then whether that has come.
            aborts.start()
        else:
            time.sleep(0.3)
        try:
            members.become(0, 1)
        except dist.DistBackendError:
            has_begun = False
        if members.me == 0:
            members.shared.set(f"begun/{number}", "")
        else:
            aborts.join()
        begin = time.monotonic()
        is_usable = False
        if has_begun:
            with contextlib.suppress(dist.DistBackendError):
                dist.barrier()
                is_usable = True
        seen.append((time.monotonic() - begin, is_usable))
        members.wait_for_all(f"seen/{number}", 2)
    return seen


def test_an_abort_counts_also_when_the_members_have_just_met() -> None:
    for seen in run_ranks(2, _abort_as_it_ends):
        assert [is_usable for _, is_usable in seen] == [False] * len(seen)
        assert max(seconds for seconds, _ in seen) < 5


def _shrink() -> tuple[int, int, float]:
    if dist.get_rank() == 1:
        die()
    dist.distributed_c10d.shrink_group([1], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    return _sum()


def test_shrink_group_leaves_out_the_dead() -> None:
    results = run_ranks(SIZE, _shrink, dying={1})
    assert results[0] == (0, 2, 11.0)
    assert results[2] == (1, 2, 11.0)


def _shrink_again() -> tuple[tuple[int, int, float], str]:
    """Have the first attempt fail, as one of them does not come; then the other is there first."""
    rank, shared = dist.get_rank(), store()
    if rank == 1:
        die()
    shrink = dist.distributed_c10d.shrink_group
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="Not there after"):
            shrink([1])
        shared.set("tried", "")
        time.sleep(1)
    else:
        shared.wait(["tried"])
    shrink([1])
    total = _sum()
    config = pickle.loads(_C.flight_recorder_trace())["pg_config"]
    return total, config[max(config)]["ranks"]


def test_shrink_group_can_be_called_again_where_a_rank_did_not_come() -> None:
    results = run_ranks(SIZE, _shrink_again, dying={1}, group_timeout=4.0)
    assert results[0] == ((0, 2, 11.0), "[0, 2]")
    assert results[2] == ((1, 2, 11.0), "[0, 2]")
