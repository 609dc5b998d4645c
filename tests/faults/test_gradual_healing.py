# SPDX-License-Identifier: Apache-2.0
"""bagua.elastic: a newcomer gets weights and optimizer state in parts while the others train on as before."""

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bagua import _gradual_transfer
from bagua._gradual_transfer import Pace, can_be_gradual, gradual_parameters
from bagua.elastic import Members, Training
from elastic_ranks import join, weights_of
from holdings import wait_for
from hooked_models import logged
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from trouble import TRANSPORTS, die, meet

pytestmark = pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has reconfigure from 2.14 on")
SIZE = 3
LAST = SIZE - 1
# The newcomer comes after the first of these, and has all long before the last.
BEGIN, END = 5, 60
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.002, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9, weight_decay=0.01),
}


def _network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 64, bias=False))


def _join(
    members: Members, seed: int, optimizer_name: str, algorithm: str = "gradient_allreduce"
) -> tuple[Training, torch.optim.Optimizer]:
    network = _network(seed)
    optimizer: torch.optim.Optimizer = OPTIMIZERS[optimizer_name](network.parameters())
    return members.train(DDP(network), optimizer, algorithm), optimizer


@contextlib.contextmanager
def _no_second_healing() -> Iterator[None]:
    """Check that what arrives is right by itself, and not only after a second transfer of all."""
    with logged() as log:
        yield
    assert "healed" not in log.getvalue()


def _state_of(training: Training, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [value for p in training.ddp.parameters() for value in optimizer.state[p].values()]
    return [value for value in state if isinstance(value, Tensor)]


def _train(algorithm: str, optimizer_name: str) -> dict[str, Any]:
    me, shared, members = join(at_least=1 if dist.get_rank() == LAST else LAST)
    found: dict[str, Any] = {}
    if me == LAST:
        shared.get("come")
    with _no_second_healing(), members:
        training, optimizer = _join(members, me, optimizer_name, algorithm)
        found["joined_at"] = training.step
        found["healed"] = []
        while training.step < END:
            if training.step == BEGIN:
                shared.set("come", "")
            if training.step >= BEGIN:
                # The step in which the newcomer is seen is another one each time, what follows from it is not.
                _wait_for_newcomer(training)
            with training.attempt():
                if training.is_healing:
                    found["healed"].append(training.step)
                _step(training, optimizer, me)
        training.wait_for_end()
        return {**found, "weights": weights_of(training), "state": _state_of(training, optimizer)}


def _wait_for_newcomer(training: Training, size: int = SIZE) -> None:
    while dist.get_world_size() < size and training.step == BEGIN:
        with training.attempt():
            pass


def _step(training: Training, optimizer: torch.optim.Optimizer, me: int) -> None:
    generator = torch.Generator().manual_seed(100 * training.step + me)
    optimizer.zero_grad()
    # A newcomer's part of a batch does not count while it is healed: afterwards it is that of another member.
    inputs = torch.randn(16, 64, generator=generator)
    (training.ddp(inputs) - inputs).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(training.ddp.parameters(), 0.5)
    optimizer.step()


@pytest.mark.parametrize(("algorithm", "optimizer"), [("gradient_allreduce", "AdamW"), ("bytegrad", "SGD")])
def test_a_newcomer_is_healed_beside_the_training_bit_for_bit(algorithm: str, optimizer: str) -> None:
    first, second, newcomer = run_ranks(SIZE, _train, algorithm, optimizer, env=TRANSPORTS["between-hosts"])
    assert newcomer["joined_at"] >= BEGIN
    # It has taken many steps with weights of which some were still to come.
    assert len(newcomer["healed"]) >= 5
    assert max(newcomer["healed"]) < END - 10
    assert first["healed"] == second["healed"] == []
    for other in (second, newcomer):
        assert torch.equal(first["weights"], other["weights"])
        assert all(torch.equal(one, another) for one, another in zip(first["state"], other["state"], strict=True))


def _until_healed(is_alone: bool) -> Tensor:
    """Return weights after steps in all of which the newcomer, if there is one, has no part in the mean."""
    _gradual_transfer._GROWTH = 1
    me, shared, members = join(at_least=LAST)
    if me == LAST:
        if is_alone:
            members.close()
            return torch.zeros(0)
        shared.get("come")
    with members:
        training, optimizer = _join(members, 0, "SGD")
        while training.step < BEGIN + 8:
            if training.step == BEGIN and not is_alone:
                shared.set("come", "")
                _wait_for_newcomer(training)
                assert training.is_healing == (me == LAST)
            with training.attempt():
                _step(training, optimizer, me)
        return weights_of(training)


def test_the_others_train_on_as_if_the_newcomer_were_not_there() -> None:
    alone, _, _ = run_ranks(SIZE, _until_healed, True)
    first, second, _ = run_ranks(SIZE, _until_healed, False)
    assert torch.equal(first, second)
    # The mean of two, taken of three with a zero, is rounded elsewhere.
    torch.testing.assert_close(first, alone, rtol=1e-4, atol=1e-5)


def _source_dies() -> dict[str, Any]:
    numbers = [0]
    # Rank 0 only serves the store, the next one is the source, and the last one the newcomer.
    _gradual_transfer._GROWTH = 1
    me, shared, members = join(at_least=1 if dist.get_rank() == SIZE else 2)
    if me == 0:
        members.close()
        shared.get("end")
        return {}
    if me == 2:
        meetings = members._group._meetings.store
        wait_for(lambda: meetings.ask(lambda store: store.check(["0/came/1"]), timedelta(0)))
    if me == SIZE:
        shared.get("come")
    with _no_second_healing(), members:
        training, optimizer = _join(members, me, "AdamW")
        members._group._meetings.at_least = 1
        while training.step < END:
            if training.step == BEGIN:
                shared.set("come", "")
                _wait_for_newcomer(training)
            with training.attempt():
                if training.step == BEGIN + 4 and me == 1:
                    die(shared)
                _step(training, optimizer, me)
            if training._transfer is not None and training.is_healing:
                numbers.append(training._transfer.own_numbers)
        # What had come before the death does not travel again.
        assert numbers == sorted(numbers)
        assert (len(numbers) > 5) == (me == SIZE)
        training.wait_for_end()
        shared.set("end", "")
        return {"weights": weights_of(training), "state": _state_of(training, optimizer)}


def test_a_newcomer_whose_source_dies_gets_the_rest_from_another_member() -> None:
    _, _, member, newcomer = run_ranks(SIZE + 1, _source_dies, dying={1})
    _are_equal(member, newcomer)


def _are_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert torch.equal(one["weights"], other["weights"])
    assert all(torch.equal(mine, its) for mine, its in zip(one["state"], other["state"], strict=True))


def _two_come_at_once(one_dies: bool) -> dict[str, Any]:
    _gradual_transfer._GROWTH = 1
    me, shared, members = join(at_least=1 if dist.get_rank() >= LAST else LAST)
    found: dict[str, Any] = {"numbers": [0], "chains": []}
    if me >= LAST:
        shared.get("come")
        meet(shared, "ready", 2)
    with _no_second_healing(), members:
        training, optimizer = _join(members, me, "AdamW")
        while training.step < END:
            if training.step == BEGIN:
                shared.set("come", "")
                _wait_for_newcomer(training, SIZE + 1)
            with training.attempt():
                if one_dies and training.step == BEGIN + 4 and me == LAST:
                    die(shared)
                if training._transfer is not None:
                    found["chains"].append(training._transfer._chain)
                _step(training, optimizer, me)
            if training._transfer is not None and training.is_healing:
                found["numbers"].append(training._transfer.own_numbers)
        training.wait_for_end()
        return {**found, "weights": weights_of(training), "state": _state_of(training, optimizer)}


@pytest.mark.parametrize("one_dies", [False, True])
def test_newcomers_hand_on_what_comes_and_keep_it_when_one_of_them_dies(one_dies: bool) -> None:
    dying = {LAST} if one_dies else set()
    first, second, *newcomers = run_ranks(SIZE + 1, _two_come_at_once, one_dies, dying=dying)
    assert len(first["chains"][0]) == 3
    _are_equal(first, second)
    for newcomer in newcomers:
        if newcomer is not None:
            _are_equal(first, newcomer)
            assert newcomer["numbers"] == sorted(newcomer["numbers"])
            assert len(newcomer["numbers"]) > 5


def _another_comes_meanwhile() -> dict[str, Any]:
    me, shared, members = join(at_least=1 if dist.get_rank() >= LAST else LAST)
    if me >= LAST:
        shared.get(f"come/{me}")
    found: dict[str, Any] = {"healed": []}
    with members:
        training, optimizer = _join(members, me, "AdamW")
        found["joined_at"] = training.step
        is_over = torch.zeros(1)
        while not is_over:
            with training.attempt():
                if training.is_healing:
                    found["healed"].append(training.step)
                    shared.set(f"come/{SIZE}", "")
                elif training.step >= BEGIN:
                    shared.set(f"come/{LAST}", "")
                _step(training, optimizer, me)
                has_all = dist.get_world_size() == SIZE + 1 and not training.is_healing
                said = torch.tensor([float(has_all)])
                dist.all_reduce(said, dist.ReduceOp.MIN)
                is_over = said
        return {**found, "weights": weights_of(training)}


def test_a_newcomer_that_comes_while_another_is_healed_joins_after_it() -> None:
    first, second, newcomer, last = run_ranks(SIZE + 1, _another_comes_meanwhile)
    assert first["healed"] == second["healed"] == []
    assert last["joined_at"] > max(newcomer["healed"])
    assert len(last["healed"]) >= 5
    for other in (second, newcomer, last):
        assert torch.equal(other["weights"], first["weights"])


def _end_meanwhile() -> Tensor:
    me, shared, members = join(at_least=1 if dist.get_rank() == LAST else LAST)
    if me == LAST:
        shared.get("come")
    with members:
        training, optimizer = _join(members, me, "AdamW")
        while training.step < BEGIN + 3:
            if training.step == BEGIN:
                shared.set("come", "")
                _wait_for_newcomer(training)
            with training.attempt():
                _step(training, optimizer, me)
        assert training.is_healing == (me == LAST)
        training.wait_for_end()
        assert not training.is_healing
        assert training.step == BEGIN + 3
        return weights_of(training)


def test_a_newcomer_that_is_healed_when_the_others_have_finished_gets_the_rest_at_once() -> None:
    first, second, newcomer = run_ranks(SIZE, _end_meanwhile)
    assert torch.equal(first, second)
    assert torch.equal(first, newcomer)


def _numbers(seconds: Callable[[int], float], steps: int, total: int | None = None) -> list[int]:
    """Return how many numbers travel in each of so many steps, which take as long as `seconds` says of the numbers.

    Without a total there are always few left.
    """
    pace = Pace(100, share=0.1)
    sent: list[int] = []
    before = 0.0
    while len(sent) < steps and (total is None or sum(sent) < total):
        sent.append(pace.numbers)
        pace.end_step(before, 1000 if total is None else max(0, total - sum(sent)))
        before = seconds(sent[-1])
    return sent


def test_parts_grow_as_long_as_steps_take_no_longer_for_them() -> None:
    assert _numbers(lambda numbers: 1.0, 10) == [100] * 4 + [400, 400, 1600, 1600, 6400, 6400]
    # 1600 numbers take 6 % of a step.
    assert set(_numbers(lambda numbers: 1 + numbers * 4e-5, 60)[20:]) == {1600}
    # Where nothing more fits, some steps try again.
    assert set(_numbers(lambda numbers: 1.0 if numbers == 100 else 2.0, 60)) == {100, 200, 400}
    # A part travels all the same where steps become slow for another reason.
    seconds = iter([1.0] * 6 + [2.0] * 54)
    assert min(_numbers(lambda numbers: next(seconds), 60)) == 100


def test_a_transfer_that_would_take_long_is_made_short_by_longer_steps() -> None:
    # A hundred numbers take 1 % of a step, and a million a hundred seconds of the line.
    sent = _numbers(lambda numbers: 1 + numbers * 1e-4, 1000, 1_000_000)
    assert len(sent) < 40
    assert max(sent) * 1e-4 <= 5
    # One that is soon over leaves steps as they are.
    sent = _numbers(lambda numbers: 1 + numbers * 1e-4, 1000, 2500)
    assert max(sent) * 1e-4 <= 0.2


def test_what_does_not_treat_each_number_by_itself_has_to_be_there_before_the_first_step() -> None:
    network: Any = _Bare(_network(0))
    parameters = list(network.module.parameters())
    assert all(can_be_gradual(network, kind(parameters)) for kind in (torch.optim.Adam, torch.optim.ASGD))
    assert not can_be_gradual(network, torch.optim.Adam(parameters[1:]))
    assert not can_be_gradual(network, torch.optim.Adafactor(parameters))
    assert not can_be_gradual(network, _Derived(parameters))
    # Their momenta would be made from weights that are not there.
    assert gradual_parameters(network, torch.optim.SGD(parameters, 0.1, momentum=0.9)) == []
    assert gradual_parameters(network, torch.optim.SGD(parameters, 0.1)) == [0, 1, 2, 3, 4]


class _Derived(torch.optim.Adam):
    """May do something else in its steps."""


class _Bare:
    """As much of a DDP model as is asked for."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters_to_ignore: set[str] = set()
