# SPDX-License-Identifier: Apache-2.0
"""bagua.elastic: what may fail in the middle of a step, and what users do in one, with deaths in between."""

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bagua import _executors
from bagua.elastic import Training
from elastic_ranks import backward, join, weights_of
from hooked_models import logged
from members import model
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from trouble import TRANSPORTS, die, meet, selection

pytestmark = pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has reconfigure from 2.14 on")
SIZE = 3
LAST = SIZE - 1
STEPS = 12


class _Halting(torch.optim.SGD):
    """Fails when it is told to, with some weights changed and others not."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self.error: Exception | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.error is not None:
            error, self.error = self.error, None
            self.param_groups[0]["params"][0].mul_(1.5)
            raise error
        return super().step(closure)


def _of_user(place: str) -> Exception:
    return dist.DistBackendError(f"of the user's {place}")


def _fail(training: Training, optimizer: _Halting) -> None:
    """Fail on the first rank, from which the others take over weights where none is further."""
    if dist.get_rank() == 0:
        if training.step in (2, 5):
            optimizer.error = _of_user("step")
        if training.step == 8:
            optimizer.error = KeyError("of the user's step, which the loop gets over")
    elif training.step == 5:
        # The others do not come to their step: it is taken again.
        dist.all_reduce(torch.zeros(1))


def _step_with_closure(training: Training, optimizer: _Halting, is_disturbed: bool) -> None:
    def closure() -> None:
        optimizer.zero_grad()
        if is_disturbed:
            raise _of_user("closure, before weights have changed")
        backward(training)

    optimizer.step(closure)


def _train_on(is_disturbed: bool) -> tuple[Tensor, int]:
    _, _, members = join(at_least=SIZE)
    failures = 0
    with logged() as log, members:
        optimizer = _Halting((network := model()).parameters())
        training = members.train(DDP(network), optimizer)
        seen: set[int] = set()
        while training.step < STEPS:
            is_first = is_disturbed and training.step not in seen
            seen.add(training.step)
            try:
                with training.attempt():
                    if training.step == 10:
                        _step_with_closure(training, optimizer, is_first)
                    else:
                        optimizer.zero_grad()
                        backward(training)
                        if is_first:
                            _fail(training, optimizer)
                        optimizer.step()
            except KeyError:
                failures += 1
    assert "in the middle on all" not in log.getvalue()
    return weights_of(training), failures


def test_a_step_that_fails_on_one_member_is_taken_once_and_whole() -> None:
    (expected, _), *_ = run_ranks(SIZE, _train_on, False)
    results = run_ranks(SIZE, _train_on, True, timeout=60.0)
    assert sorted(failures for _, failures in results) == [0, 0, 1]
    for weights, _ in results:
        assert torch.equal(weights, expected)


def _fail_together() -> tuple[Tensor, list[int]]:
    me, _, members = join(at_least=SIZE)
    with members:
        optimizer = _Halting((network := model()).parameters())
        training = members.train(DDP(network), optimizer)
        steps = []
        while training.step < STEPS:
            steps.append(training.step)
            with training.attempt():
                backward(training)
                if training.step == 3 and steps.count(3) == 1:
                    optimizer.state[network[0].weight]["momentum_buffer"].add_(me)
                    optimizer.error = _of_user("step, on all members")
                optimizer.step()
                optimizer.zero_grad()
    return weights_of(training), steps


def test_members_whose_steps_have_all_failed_in_the_middle_go_on_with_equal_weights() -> None:
    (first, steps), *others = run_ranks(SIZE, _fail_together)
    assert steps.count(3) == 2
    assert all(torch.equal(weights, first) for weights, _ in others)


def _die_in_a_round() -> tuple[Tensor, int]:
    me, shared, members = join(at_least=SIZE)
    with members:
        optimizer = torch.optim.AdamW((network := model(seed=me)).parameters(), 0.01)
        steps: list[int] = []

        def note(*_: Any) -> None:
            steps.append(0)
            if len(steps) == 4 and me == LAST:
                die(shared)

        # It is called before the algorithm's, which averages weights in every second step.
        optimizer.register_step_post_hook(note)
        training = members.train(DDP(network), optimizer, "local_sgd", sync_every=2)
        members._group._meetings.at_least = 1
        while training.step < STEPS:
            with training.attempt():
                backward(training)
                optimizer.step()
                optimizer.zero_grad()
        training.wait_for_end()
        training.handle.synchronize()
    return weights_of(training), int(optimizer.state[network[0].weight]["step"])


def test_a_death_while_an_algorithm_averages_in_a_step_leaves_equal_weights() -> None:
    (first, steps), (second, other_steps), _ = run_ranks(SIZE, _die_in_a_round, dying={LAST})
    assert torch.equal(first, second)
    assert steps == other_steps == STEPS


def _die_as_groups_are_made(place: str) -> float:
    """Return how long the others take to their next step."""
    me, shared, members = join(at_least=SIZE)
    with members:
        optimizer = torch.optim.SGD((network := model()).parameters(), 0.05)
        training = members.train(DDP(network), optimizer, "local_sgd", sync_every=2)
        members._group._meetings.at_least = 1
        begin = seconds = 0.0
        while training.step < STEPS:
            with training.attempt():
                if training.step == 5 and not begin:
                    begin = time.monotonic()
                    if me == LAST:
                        assert hasattr(_executors, place)
                        setattr(_executors, place, lambda *_, **__: die(shared))
                        raise _of_user("code, after which all meet")
                backward(training)
                optimizer.step()
                optimizer.zero_grad()
            if begin and not seconds and training.step > 5:
                seconds = time.monotonic() - begin
        training.wait_for_end()
    return seconds


@pytest.mark.parametrize(
    ("transport", "place"),
    selection(
        itertools.product(TRANSPORTS, ["_private_group", "new_named_group"]),
        [("in-host", "_private_group"), ("between-hosts", "new_named_group")],
    ),
)
def test_a_death_as_an_algorithm_makes_a_group_is_noticed_like_any_other(transport: str, place: str) -> None:
    times = run_ranks(SIZE, _die_as_groups_are_made, place, env=TRANSPORTS[transport], dying={LAST})
    assert max(times[:LAST]) < 6


def _oldest_fails() -> tuple[bool, str, bool]:
    _, shared, members = join(at_least=SIZE)
    is_oldest, error = False, ""
    try:
        with members:
            optimizer = torch.optim.SGD((network := model()).parameters(), 0.05)
            training = members.train(DDP(network), optimizer)
            members._group._meetings.at_least = 1
            is_oldest = dist.get_rank() == 0
            while training.step < STEPS or dist.get_world_size() == SIZE:
                with training.attempt():
                    if is_oldest:
                        raise _of_user("code")
                    backward(training)
                    optimizer.step()
            training.wait_for_end()
    except dist.DistBackendError as raised:
        error = str(raised)
    meet(shared, "over", SIZE)  # one of them serves the store
    return is_oldest, error, training.step >= STEPS


def test_the_member_whose_own_code_fails_again_and_again_ends_and_those_that_see_it_go_on() -> None:
    results = run_ranks(SIZE, _oldest_fails, timeout=60.0)
    assert sorted(one[:2] for one in results) == [(False, "")] * LAST + [(True, "of the user's code")]
    assert all(has_ended for is_oldest, _, has_ended in results if not is_oldest)


def _heal_apart() -> tuple[Tensor, str]:
    """Have a member fail to heal when the other has healed, both with the weights of the same steps."""
    _, _, members = join(at_least=2)
    with logged() as log, members:
        optimizer = torch.optim.SGD((network := model()).parameters(), 0.05)
        training = members.train(DDP(network), optimizer)
        heal, is_armed = training._state.heal, iter([True, False])

        def heal_and_fail(*args: Any, **kwargs: Any) -> Any:
            progress = heal(*args, **kwargs)
            if next(is_armed, False):
                time.sleep(0.3)  # until the other has healed
                raise _of_user("second death, of which the other has not heard")
            return progress

        has_failed = dist.get_rank() == 0
        while training.step < STEPS:
            with training.attempt():
                if training.step == 5 and not has_failed:
                    has_failed = True
                    training._state.heal = heal_and_fail  # type: ignore[method-assign]
                    raise _of_user("code")
                backward(training)
                optimizer.step()
                optimizer.zero_grad()
    return weights_of(training), log.getvalue()


def test_members_of_which_one_has_healed_and_another_has_not_drop_no_steps() -> None:
    (first, said), (second, other_said) = run_ranks(2, _heal_apart)
    assert torch.equal(first, second)
    assert "another group" not in said + other_said


class _Branches(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([model(), model()])
        self.which = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.which += 1
        result: Tensor = self.layers[self.which % 2](inputs)
        return result


class _Loop:
    """What users do in a step: with a scaler, in two backwards, or with parameters that are not used."""

    def __init__(self, kind: str, me: int) -> None:
        network = _Branches() if kind == "unused" else model(seed=me)
        self.ddp = DDP(network, find_unused_parameters=kind == "unused")
        self.optimizer = torch.optim.AdamW(network.parameters(), 0.01)
        # The first steps overflow, and are not taken.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=50, enabled=kind == "scaler")
        self.is_cut = kind == "no_sync"

    def step(self, step: int, may_die: Callable[[], None]) -> None:
        # What an attempt that has failed has left of them was dropped.
        assert all(p.grad is None for p in self.ddp.parameters())
        for part in range(1 + self.is_cut):
            is_local = self.is_cut and part == 0
            generator = torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank())
            with self.ddp.no_sync() if is_local else contextlib.nullcontext():
                loss = self.ddp(torch.randn(4, 8, generator=generator)).square().sum()
                if not is_local and not self.scaler.is_enabled():
                    may_die()
                self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        if self.scaler.is_enabled():
            may_die()
            dist.all_reduce(torch.zeros(1))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def _use(kind: str) -> tuple[Tensor, dict[str, Any]]:
    me, shared, members = join(at_least=SIZE)
    with members:
        loop = _Loop(kind, me)
        training = members.train(loop.ddp, loop.optimizer, "bytegrad", others=[loop.scaler])
        members._group._meetings.at_least = 1

        def die_in_time() -> None:
            if me == LAST and training.step == 5:
                die(shared)

        while training.step < STEPS:
            with training.attempt():
                loop.step(training.step, die_in_time)
    return weights_of(training), loop.scaler.state_dict()


@pytest.mark.parametrize("kind", ["scaler", "no_sync", "unused"])
def test_what_users_do_in_a_step_outlives_a_death(kind: str) -> None:
    (first, state), (second, other_state), _ = run_ranks(SIZE, _use, kind, dying={LAST})
    assert torch.equal(first, second)
    assert state == other_state
    assert (kind == "scaler") == (0 < state.get("scale", 0) < 2.0**127)
