# SPDX-License-Identifier: Apache-2.0
"""bagua.elastic: members hold the same weights whatever fails and wherever, and an error of one's own is told."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bagua import _healing
from bagua._healing import TrainingState
from bagua._progress import Progress, Stage
from bagua.elastic import Training
from elastic_ranks import backward, join, weights_of
from hooked_models import logged, same_everywhere
from members import Members, model
from ranks import on_new_ranks, run_ranks
from torch.nn.parallel import DistributedDataParallel as DDP
from trouble import TRANSPORTS, die, meet, store

pytestmark = pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has reconfigure from 2.14 on")
SIZE = 3
LAST = SIZE - 1


def _train(steps: int, within: Callable[[Training, int, dist.Store], None], algorithm: str = "bytegrad") -> Any:
    """Return the weights after so many steps; `within` is called after the optimizer's step in each attempt."""
    me, shared, members = join(at_least=SIZE)
    with members:
        network = model(seed=me)
        optimizer = torch.optim.AdamW(network.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        training = members.train(DDP(network), optimizer, algorithm, [schedule])
        members._group._meetings.at_least = 1
        while training.step < steps:
            with training.attempt():
                optimizer.zero_grad()
                backward(training)
                optimizer.step()
                within(training, me, shared)
                schedule.step()
    counts = [int(optimizer.state[p]["step"]) for p in network.parameters()]
    return weights_of(training), counts, optimizer.param_groups[0]["lr"], schedule.state_dict()


def _die_before_a_message(training: Training, me: int, shared: dist.Store) -> None:
    if training.step == 5 and me == LAST:
        shared.set("rank", str(dist.get_rank()))
        die(shared)
    # It fails here after its weights have changed, and the other one does not.
    if training.step == 5 and me == 0:
        dist.recv(torch.zeros(1), int(shared.get("rank")))


@pytest.mark.parametrize("steps", [8, 5])
def test_a_death_after_the_step_of_the_optimizer_leaves_equal_weights(steps: int) -> None:
    results = run_ranks(SIZE, _train, steps, _die_before_a_message, dying={LAST})
    (first, counts, *more), (second, *others), _ = results
    assert torch.equal(first, second)
    assert others == [counts, *more]
    assert set(counts) == {steps}


def _seconds_to_go_on() -> float:
    ended: list[float] = []

    def within(training: Training, me: int, shared: dist.Store) -> None:
        if training.step == 5 and me == LAST:
            shared.set("died at", str(time.time()))
            die(shared)
        if training.step == 7 and not ended:
            ended.append(time.time() - float(shared.get("died at")))

    _train(8, within)
    return ended[0]


def test_others_go_on_within_a_second_of_a_death_between_hosts() -> None:
    *others, _ = run_ranks(SIZE, _seconds_to_go_on, env=TRANSPORTS["between-hosts"], dying={LAST})
    assert max(others) < 1


def _fail_always(training: Training, me: int, shared: dist.Store) -> None:
    if training.step >= 5:
        raise dist.DistBackendError("of the user's code")


@on_new_ranks(SIZE)
def test_an_error_that_comes_again_and_again_without_a_death_is_raised() -> None:
    shared = store()
    with pytest.raises(dist.DistBackendError, match="of the user's code") as raised:
        _train(1000, _fail_always)
    # The others need the store, which the first rank serves: the error's frames hold it.
    meet(shared, "over", SIZE)
    assert raised.tb is not None


def _step_until(
    training: Training,
    optimizer: torch.optim.Optimizer,
    is_over: Callable[[], bool],
    within: Callable[[], None] = lambda: None,
) -> None:
    """Train until all members see that it is over; `within` is called before the optimizer's step."""
    have_all_seen = torch.zeros(1)
    while not have_all_seen:
        with training.attempt():
            optimizer.zero_grad()
            training.ddp(torch.ones(4, 8)).square().mean().backward()
            within()
            optimizer.step()
            said = torch.tensor([int(is_over())])
            dist.all_reduce(said, dist.ReduceOp.MIN)
            have_all_seen = said


def _another_comes() -> Any:
    me, shared, members = join(at_least=1 if dist.get_rank() == LAST else LAST)
    with members:
        network = model(seed=me)
        optimizer = torch.optim.SGD(network.parameters(), 0.01)
        ddp = DDP(network)
        if me == LAST:
            shared.get("train")
            with pytest.raises(ValueError, match=r"They have the algorithm bytegrad.*; this one has the algorithm lo"):
                members.train(ddp, optimizer, "local_sgd")
            # A hook of the optimizer would go on exchanging weights.
            assert not optimizer._optimizer_step_post_hooks
        training = members.train(ddp, optimizer, "bytegrad")
        shared.set("train", "")
        _step_until(training, optimizer, lambda: dist.get_world_size() == SIZE and not training.is_healing)
        return weights_of(training), training.step


def test_a_newcomer_of_another_algorithm_is_told_so_and_joins_with_that_of_the_members() -> None:
    (first, step), *others = run_ranks(SIZE, _another_comes, timeout=60.0)
    for weights, steps in others:
        assert torch.equal(weights, first)
        assert steps == step


def _unequal(others: Sequence[Any] = ()) -> tuple[int, DDP, TrainingState]:
    """Become one of two members, each with weights of its own."""
    changing = Members()
    changing.become(changing.me)
    network = model(seed=changing.me)
    network.register_buffer("cache", torch.full((2,), 1.0 + changing.me), persistent=False)
    ddp = DDP(network)
    state = TrainingState(ddp, torch.optim.SGD(ddp.parameters(), 0.1), None, list(others))
    changing.become(0, 1)
    return changing.me, ddp, state


def _half_healed() -> list[Progress]:
    me, ddp, state = _unequal()
    before = Progress(5 if me == 0 else 3, Stage.DONE)
    found = []

    def fail(*_: Any) -> None:
        raise dist.DistBackendError("fails here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_healing, "barrier", fail)
        with pytest.raises(dist.DistBackendError, match="fails here"):
            state.heal(before, timedelta(seconds=20))
    found.append(state.progress)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ddp.module, "load_state_dict", fail)
        if me == 1:
            with pytest.raises(dist.DistBackendError, match="fails here"):
                state.heal(before, timedelta(seconds=20))
        else:
            patch.setattr(_healing, "barrier", lambda *_: None)
            state.heal(before, timedelta(seconds=20))
    found.append(state.progress)
    return found


def test_after_a_transfer_that_failed_a_rank_counts_the_steps_of_the_weights_that_it_has() -> None:
    assert run_ranks(2, _half_healed) == [
        [Progress(5, Stage.DONE), Progress(5, Stage.DONE)],
        [Progress(5, Stage.DONE), _healing.A_PART],
    ]


@on_new_ranks(2)
def test_where_only_parts_of_the_weights_are_left_nobody_trains_on_from_them() -> None:
    me, _, state = _unequal()
    progress = _healing.A_PART if me == 0 else Progress(-1, Stage.DONE)
    with pytest.raises(RuntimeError, match="all members that had all weights have died"):
        state.heal(progress, timedelta(seconds=20))


@on_new_ranks(2)
def test_weights_that_differ_after_the_same_steps_are_made_equal() -> None:
    _, ddp, state = _unequal()
    state.heal(Progress(3, Stage.DONE), timedelta(seconds=20), are_weights_equal=True)
    assert same_everywhere(*ddp.parameters())


@on_new_ranks(1)
def test_what_cannot_go_on_with_other_members_is_refused() -> None:
    _, _, members = join(at_least=1)
    with members:
        network = model()
        optimizer = torch.optim.SGD(network.parameters(), 0.01)
        with pytest.raises(ValueError, match="static_graph"):
            members.train(DDP(network, static_graph=True), optimizer)
        delayed = {
            "delay_all_reduce_named_params": [("0.bias", network[0].bias)],
            "param_to_hook_all_reduce": network[0].weight,
        }
        with pytest.raises(ValueError, match="delay_all_reduce_named_params does not work"):
            members.train(DDP(network, **delayed), optimizer)
        members.train(DDP(network), optimizer)
        with pytest.raises(RuntimeError, match=r"train\(\) has been called already"):
            members.train(DDP(model()), optimizer)
    # A hook of the optimizer would count on.
    assert not optimizer._optimizer_step_post_hooks


class _Count:
    """A state beside model and optimizer."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "tensor": torch.full((3,), self.count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["tensor"], torch.full((3,), state["count"]))
        self.count = state["count"]


@pytest.mark.parametrize("former_group", [0, 7], ids=["of one group", "of two"])
@on_new_ranks(2)
def test_states_beside_the_model_are_made_equal_and_weights_whose_steps_were_taken_in_another_group(
    former_group: int,
) -> None:
    count = _Count(dist.get_rank())
    me, ddp, state = _unequal([count])
    progress = Progress(3, Stage.DONE)
    groups = frozenset({former_group + me}) if former_group else frozenset()
    with logged() as log:
        assert state.heal(progress, timedelta(seconds=20), groups=groups) == progress
    said = "of the 3 steps that rank 1 has behind it the last were taken in another group, and are dropped\n"
    assert log.getvalue() == (said if former_group else "")
    assert count.count == 0
    assert same_everywhere(*ddp.parameters()) == (former_group > 0)


@pytest.mark.parametrize("length", [1, 3])
@on_new_ranks(2)
def test_buffers_that_are_not_saved_are_healed_also_where_a_forward_has_made_or_enlarged_them(length: int) -> None:
    me, ddp, state = _unequal()
    if me == 0:
        ddp.module.cache = torch.full((length,), 7.0)
        ddp.module.register_buffer("later", torch.ones(2), persistent=False)
    state.heal(Progress(3 if me == 0 else -1, Stage.DONE), timedelta(seconds=20))
    assert torch.equal(ddp.module.cache, torch.full((length,), 7.0))


@on_new_ranks(2)
def test_buffers_that_are_right_on_no_rank_are_made_equal_all_the_same() -> None:
    count = _Count(dist.get_rank())
    _, _, state = _unequal([count])
    state._are_buffers_due = True
    state.heal(Progress(3, Stage.DONE), timedelta(seconds=20))
    assert count.count == 0


def test_what_cannot_be_told_apart_by_its_numbers_has_another_digest() -> None:
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0]), torch.zeros(2), torch.zeros(2, 0)]
    tensors += [torch.tensor(1 - 2j)]
    tensors += [torch.zeros(5000), torch.cat([torch.zeros(4999), torch.ones(1)]), torch.ones(3, dtype=torch.bfloat16)]
    tensors += [torch.cat([torch.ones(1), torch.zeros(4999)]), torch.ones(7, dtype=torch.float8_e5m2)]
    digests = [_healing._digest([tensor]) for tensor in tensors]
    assert len(set(digests)) == len(tensors)


@on_new_ranks(1)
def test_a_state_that_others_could_not_be_given_is_an_error_before_they_need_it() -> None:
    _, _, members = join(at_least=1)
    with members:
        network = model()
        optimizer = torch.optim.SGD(network.parameters(), 0.01)
        others = [torch.optim.lr_scheduler.StepLR(optimizer, 1), _Count(lambda: 0)]  # type: ignore[arg-type]
        ddp = DDP(network)
        with pytest.raises(Exception, match=r"full\(\)"):
            members.train(ddp, optimizer, others=others)
        assert members.train(ddp, optimizer, "bytegrad").step == 0


def _fail_while_the_store_is_stopped(members: Any, server: int) -> None:
    with members:
        network = model()
        training = members.train(DDP(network), torch.optim.SGD(network.parameters(), 0.01))
        os.kill(server, signal.SIGSTOP)
        time.sleep(1)
        with training.attempt():
            raise KeyError(time.monotonic())


def _seconds_of_the_error() -> float:
    """Rank 0 only serves the store."""
    me, shared, members = join(at_least=1)
    if me == 0:
        members.close()
        shared.set("server", str(os.getpid()))
        shared.wait(["over"], timedelta(seconds=60))
        return 0.0
    server = int(shared.get("server"))
    with pytest.raises(KeyError) as raised:
        _fail_while_the_store_is_stopped(members, server)
    seconds = time.monotonic() - float(raised.value.args[0])
    os.kill(server, signal.SIGCONT)
    shared.set("over", "")
    return seconds


def test_an_error_of_the_user_arrives_also_while_the_store_does_not_answer() -> None:
    assert max(run_ranks(2, _seconds_of_the_error, timeout=30.0)) < 5


def _odd_newcomer() -> Any:
    me, shared, members = join(at_least=1 if dist.get_rank() == LAST else LAST)
    with members:
        network = model(seed=me)
        optimizer = torch.optim.SGD(network.parameters(), 0.01)
        if me == LAST:
            shared.get("train")
        training = members.train(DDP(network), optimizer)
        shared.set("train", "")
        _step_until(
            training,
            optimizer,
            lambda: shared.check(["odd"]) and dist.get_world_size() == LAST,
            within=lambda: dist.all_reduce(torch.zeros(3)) if me == LAST else None,
        )
        return weights_of(training)


def _odd_newcomer_is_told() -> Any:
    if dist.get_rank() != LAST:
        return _odd_newcomer()
    shared = store()
    with pytest.raises(dist.DistError, match="do not make the same call"):
        _odd_newcomer()
    shared.set("odd", "")
    return None


def test_a_newcomer_that_makes_other_calls_gives_up_and_the_members_go_on() -> None:
    first, second, _ = run_ranks(SIZE, _odd_newcomer_is_told, timeout=60.0)
    assert torch.equal(first, second)
