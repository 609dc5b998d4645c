# SPDX-License-Identifier: Apache-2.0
"""Where fused optimizers put weights, gradients and state, and what they leave where it is."""

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from bagua.torch_api.contrib import fuse_optimizer
from bagua.torch_api.contrib.fuse import _chunk, _fusion
from bagua.torch_api.contrib.fuse.optimizer import calculate_mutual_groups
from fused_training import (
    DEVICES,
    assert_same,
    assert_same_training,
    backward,
    fused,
    parameters_of,
    take_step,
    train,
    two_groups,
)
from torch import Tensor, nn, optim

adam = partial(optim.Adam, lr=0.05, weight_decay=0.1)
sgd = partial(optim.SGD, lr=0.05, momentum=0.9)
with_either = pytest.mark.parametrize("config", [adam, sgd], ids=["Adam", "SGD"])
in_both_modes = pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])


def _storages(tensors: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _trained(config: Any, make: Callable[[], list[Tensor]], steps: int = 20, **options: Any) -> tuple[Any, Any, Any]:
    """The parameters after plain and after fused training, and the fused optimizer."""
    results = []
    for kind in (config, fused(config)):
        parameters = make()
        optimizer = kind(parameters)
        train(optimizer, parameters, range(steps), **options)
        results.append([p.detach() for p in parameters])
    return *results, optimizer


@pytest.mark.parametrize("device", DEVICES)
def test_flattening_moves_parameters_together_and_keeps_all_else(device: str) -> None:
    parameters = parameters_of(device=device)
    before = [(id(p), p.detach().clone(), p.stride()) for p in parameters]
    optimizer = fuse_optimizer(adam(two_groups(parameters)))
    assert optimizer.param_groups[0]["params"] == parameters[:4]
    assert [id(p) for p in parameters] == [identity for identity, *_ in before]
    assert_same([p.detach() for p in parameters], [value for _, value, *_ in before])
    # Alignment decides which kernels multiply matrices.
    assert [p.stride() for p in parameters] == [stride for *_, stride in before]
    assert [p.data_ptr() % 64 for p in parameters] == [0] * 7
    assert parameters[3].is_contiguous(memory_format=torch.channels_last)
    assert len(_storages(parameters[:4])) == len(_storages(parameters[4:])) == 1
    assert all(p.requires_grad and p.is_leaf for p in parameters)


def test_without_flattening_nothing_moves_and_parameters_with_memory_of_their_own_are_stepped_plainly() -> None:
    parameters = parameters_of()
    addresses = [p.data_ptr() for p in parameters]
    optimizer = assert_same_training(adam, make=parameters_of, fuse=partial(fused, do_flatten=False))
    assert optimizer._bagua_fused_count == 0
    optimizer = fuse_optimizer(adam(parameters), do_flatten=False)
    train(optimizer, parameters, range(3))
    assert addresses == [p.data_ptr() for p in parameters]
    assert not optimizer._bagua_check_flatten


def _slices(shared: Tensor, *, reverse: bool = False) -> list[nn.Parameter]:
    """Parameters side by side in the middle of larger memory."""
    values = [shared[3:8], shared[8:10], shared[10:22].view(3, 4)]
    parameters = [nn.Parameter(value) for value in values]
    return parameters[::-1] if reverse else parameters


@in_both_modes
@pytest.mark.parametrize("do_flatten", [True, False])
@pytest.mark.parametrize("reverse", [True, False], ids=["reversed", "in-order"])
@with_either
def test_parameters_side_by_side_are_fused_where_they_are(
    config: Any, reverse: bool, do_flatten: bool, set_to_none: bool
) -> None:
    shared = torch.randn(30, generator=torch.Generator().manual_seed(3))
    expected, start = shared.clone(), shared.clone()
    plain = _slices(expected, reverse=reverse)
    train(config(plain), plain, range(20), set_to_none=set_to_none)
    parameters = _slices(shared, reverse=reverse)
    optimizer = fuse_optimizer(config(parameters), do_flatten=do_flatten)
    train(optimizer, parameters, range(20), set_to_none=set_to_none)
    assert_same(shared, expected)
    assert_same([shared[:3], shared[22:]], [start[:3], start[22:]])  # the rest of the memory is untouched
    assert optimizer._bagua_fused_count == 20
    assert _storages(parameters) == _storages([shared])


@in_both_modes
@with_either
def test_gradients_side_by_side_are_used_where_they_are(config: Any, set_to_none: bool) -> None:
    results = []
    for kind in (config, fused(config, do_flatten=False)):
        weights, gradients = torch.ones(30), torch.zeros(30)
        parameters = _slices(weights)
        optimizer: Any = kind(parameters)
        for step in range(5):
            gradients.copy_(torch.arange(30.0) + step)
            for p, g in zip(parameters, _slices(gradients), strict=True):
                p.grad = g.data
            take_step(optimizer)
        assert _storages(p.grad for p in parameters) == _storages([gradients])
        results.append(weights)
    assert_same(*results)
    assert all(
        chunk.gradients._buffer is None for plan in optimizer._bagua_fused_optimizer._plans for chunk in plan.chunks
    )


def test_a_second_optimizer_finds_parameters_where_the_first_has_put_them() -> None:
    def both(kind: Callable[[Any], Any]) -> tuple[list[Tensor], Any]:
        parameters = parameters_of()
        train(kind(sgd)(parameters), parameters, range(5))
        first, second = kind(sgd)(parameters), kind(adam)(parameters)
        for step in range(5, 20):
            train(first if step % 2 else second, parameters, [step])
        return [p.detach() for p in parameters], second

    expected, _ = both(lambda config: config)
    weights, optimizer = both(fused)
    assert_same(weights, expected)
    assert optimizer._bagua_fused_count == 7


@in_both_modes
@with_either
def test_parameters_on_the_same_memory_are_stepped_one_after_the_other(config: Any, set_to_none: bool) -> None:
    def make() -> list[Tensor]:
        parameters = parameters_of()
        # Tied by data, tied in part, and a free pair.
        return [
            *parameters[:2],
            nn.Parameter(parameters[0].data),
            nn.Parameter(parameters[1].data[1:3]),
            *parameters[2:],
        ]

    expected, weights, optimizer = _trained(config, make, set_to_none=set_to_none)
    assert_same(weights, expected)
    assert optimizer._bagua_fused_count == 20
    tied = optimizer.param_groups[0]["params"]
    assert tied[0].data_ptr() == tied[2].data_ptr()


def test_a_parameter_that_is_used_twice_in_the_model_is_stepped_once() -> None:
    def model() -> nn.Module:
        torch.manual_seed(2)
        first, last = nn.Linear(5, 5), nn.Linear(5, 5)
        last.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), last)

    results = []
    for kind in (adam, fused(adam)):
        net = model()
        optimizer: Any = kind(net.parameters())
        for step in range(10):
            optimizer.zero_grad()
            net(torch.full((2, 5), float(step))).square().sum().backward()
            take_step(optimizer)
        assert net[2].weight is net[0].weight
        results.append([p.detach() for p in net.parameters()])
    assert_same(*results)
    assert optimizer._bagua_fused_count == 10


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@with_either
def test_a_parameter_that_is_given_twice_is_stepped_twice(config: Any) -> None:
    def make() -> list[Tensor]:
        parameters = parameters_of()
        return [*parameters, parameters[1]]

    results = []
    for kind in (config, fused(config)):
        parameters = make()
        optimizer: Any = kind(parameters)
        for step in range(10):
            optimizer.zero_grad()
            backward(parameters[:-1], step)
            take_step(optimizer)
        results.append([p.detach() for p in parameters])
    assert_same(*results)
    assert optimizer._bagua_fused_count == 10


def _held_tensors() -> tuple[list[nn.Parameter], Any]:
    parameters = parameters_of([(3,), (4,), (5,), (6,)])
    return parameters, [parameters[0].detach(), parameters[1].data]


def _held_state_dict() -> tuple[list[nn.Parameter], Any]:
    torch.manual_seed(5)
    model = nn.Linear(2, 3)
    return [*model.parameters(), *parameters_of([(5,), (6,)])], list(model.state_dict().values())


def _arrays() -> tuple[list[nn.Parameter], Any]:
    arrays = [np.ones(3, np.float32), np.zeros(4, np.float32)]
    return [*(nn.Parameter(torch.from_numpy(a)) for a in arrays), *parameters_of([(5,), (6,)])], arrays


def _shared_by_processes() -> tuple[list[nn.Parameter], Any]:
    parameters = parameters_of([(3,), (4,), (5,), (6,)])
    for p in parameters[:2]:
        p.share_memory_()
    return parameters, []


@pytest.mark.parametrize("outside", [_held_tensors, _held_state_dict, _arrays, _shared_by_processes])
def test_memory_that_others_use_stays_in_use(
    outside: Callable[[], tuple[list[nn.Parameter], Any]], caplog: pytest.LogCaptureFixture
) -> None:
    parameters, others = outside()
    addresses = [p.data_ptr() for p in parameters[:2]]
    optimizer = fuse_optimizer(adam(parameters))
    assert [record.getMessage() for record in caplog.records] == [
        "fuse_optimizer leaves 2 parameters where they are: their memory is used by somebody else, too: a tied weight, "
        "or a state_dict() that is still held"
    ]
    train(optimizer, parameters, range(3))
    assert addresses == [p.data_ptr() for p in parameters[:2]]
    for p, other in zip(parameters, others, strict=False):
        assert torch.equal(p.detach(), torch.as_tensor(other))
    assert optimizer._bagua_fused_count == 3  # the other two
    assert len(caplog.records) == 1


def _odd_parameters() -> list[Tensor]:
    return [
        *parameters_of(),
        nn.Parameter(torch.tensor(0.5)),
        nn.Parameter(torch.zeros(0)),
        nn.Parameter(torch.ones(3, 4)[:, ::2]),
        nn.Parameter(torch.ones(1).expand(1, 1)),
        nn.Parameter(torch.tensor([1 + 2j, 3 - 1j])),
    ]


@in_both_modes
@with_either
def test_parameters_of_other_kinds_are_stepped_by_themselves(config: Any, set_to_none: bool) -> None:
    results = []
    for kind in (config, fused(config)):
        parameters = _odd_parameters()
        strides = [p.stride() for p in parameters]
        optimizer: Any = kind(parameters)
        for step in range(20):
            optimizer.zero_grad(set_to_none=set_to_none)
            backward(parameters[:-1], step)
            parameters[-1].grad = torch.tensor([0.3 - step * 1j, 0.1])
            take_step(optimizer)
        assert strides == [p.stride() for p in parameters]
        results.append(([p.detach() for p in parameters], optimizer.state_dict()))
    assert_same(*results)
    assert optimizer._bagua_fused_count == 20


@with_either
def test_a_gradient_in_another_order_of_memory_is_stepped_by_itself(config: Any) -> None:
    results = []
    for kind in (config, fused(config)):
        parameters = parameters_of()
        optimizer: Any = kind(parameters)
        for step in range(6):
            optimizer.zero_grad()
            backward(parameters, step)
            grad = parameters[3].grad
            assert grad is not None
            if step % 2:
                parameters[3].grad = grad.contiguous()  # the weight is channels_last
            take_step(optimizer)
        results.append([p.detach() for p in parameters])
    assert_same(*results)
    assert optimizer._bagua_fused_count == 6


@with_either
def test_parts_of_limited_size_are_moved_one_after_the_other(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fusion, "_CHUNK_BYTES", 200)
    optimizer = assert_same_training(config)
    assert optimizer._bagua_fused_count == 24 * 2
    assert len(_storages(optimizer.param_groups[0]["params"])) > 1


def _messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    assert all(record.name == "bagua" and record.levelno == logging.WARNING for record in caplog.records)
    caplog.clear()
    return found


@pytest.mark.parametrize("check_flatten", [True, False])
@in_both_modes
@with_either
def test_weights_that_were_moved_are_moved_back(
    config: Any, set_to_none: bool, check_flatten: bool, caplog: pytest.LogCaptureFixture
) -> None:
    expected = parameters_of()
    train(config(expected), expected, range(12), set_to_none=set_to_none)
    parameters = parameters_of()
    optimizer = fuse_optimizer(config(parameters), check_flatten=check_flatten)
    train(optimizer, parameters, range(4), set_to_none=set_to_none)
    for p in parameters[2:4]:
        p.data = p.data.clone()
    train(optimizer, parameters, [4], set_to_none=set_to_none)
    messages = _messages(caplog)
    assert [message[:40] for message in messages] == ["fuse_step: the weights of 2 parameters w"] * check_flatten
    assert len(_storages(parameters)) == 1
    train(optimizer, parameters, range(5, 12), set_to_none=set_to_none)
    assert not _messages(caplog)
    assert_same([p.detach() for p in parameters], [p.detach() for p in expected])
    assert optimizer._bagua_fused_count == 12


@with_either
def test_weights_that_were_moved_to_memory_of_others_stay_there(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    results = []
    for kind in (config, fused(config)):
        parameters = parameters_of()
        optimizer: Any = kind(parameters)
        train(optimizer, parameters, range(4))
        elsewhere = parameters[2].data.clone()
        parameters[2].data = elsewhere
        parameters[1].data = parameters[5].data[1]  # now tied, without a word to anybody
        tied = parameters[:1] + parameters[2:]
        train(optimizer, tied, range(4, 10))
        assert parameters[2].data_ptr() == elsewhere.data_ptr()
        results.append([p.detach() for p in parameters])
    assert_same(*results)
    assert [message[:40] for message in _messages(caplog)] == ["fuse_step: the weights of 2 parameters w"]
    assert optimizer._bagua_fused_count == 10


@pytest.mark.parametrize("change", ["type", "order", "assigned"])
@with_either
def test_a_model_that_changes_altogether_is_flattened_again(config: Any, change: str) -> None:
    results = []
    for kind in (config, fused(config)):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Conv2d(3, 5, 2), nn.Conv2d(5, 3, 2))
        images = torch.randn(2, 3, 4, 4)
        optimizer: Any = kind(model.parameters())
        for step in range(10):
            if step == 5:
                if change == "type":
                    model.double()
                    images = images.double()
                elif change == "order":
                    model.to(memory_format=torch.channels_last)
                else:
                    for p in model.parameters():
                        p.data = p.data.clone()
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.zero_grad()
            model(images).square().sum().backward()
            take_step(optimizer)
        results.append([p.detach() for p in model.parameters()])
    assert_same(*results)
    assert optimizer._bagua_fused_count == 10
    # Biases have no order, and stay where they are.
    assert len(_storages(model.parameters())) == (2 if change == "order" else 1)


@pytest.mark.parametrize("check_flatten", [True, False])
def test_state_that_was_replaced_is_moved_back(check_flatten: bool, caplog: pytest.LogCaptureFixture) -> None:
    expected = parameters_of()
    plain = adam(expected)
    parameters = parameters_of()
    optimizer = fuse_optimizer(adam(parameters), check_flatten=check_flatten)
    for own, weights in ((plain, expected), (optimizer, parameters)):
        train(own, weights, range(4))
        own.state[weights[1]]["exp_avg"] = torch.full((5,), 0.25)
        own.state[weights[2]]["exp_avg"].data = torch.full((64,), 0.5)
        own.state[weights[5]]["step"] += 3
        own.state[weights[6]] = {**own.state[weights[6]], "step": torch.tensor(9.0)}
        train(own, weights, [4])
    assert [message[:38] for message in _messages(caplog)] == ["fuse_step: the optimizer's state of 3 "] * check_flatten
    train(plain, expected, range(5, 12))
    train(optimizer, parameters, range(5, 12))
    assert not _messages(caplog)
    assert_same([p.detach() for p in parameters], [p.detach() for p in expected])
    assert_same(optimizer.state_dict(), plain.state_dict())
    assert optimizer._bagua_fused_count == 12


@pytest.mark.parametrize("check_flatten", [True, False])
@with_either
def test_kept_gradients_live_side_by_side_until_they_are_replaced(
    config: Any, check_flatten: bool, caplog: pytest.LogCaptureFixture
) -> None:
    expected = parameters_of()
    train(config(expected), expected, range(12))
    parameters = parameters_of()
    optimizer = fuse_optimizer(config(parameters), check_flatten=check_flatten)
    train(optimizer, parameters, [0], set_to_none=False)
    kept = [p.grad for p in parameters]
    train(optimizer, parameters, range(1, 4), set_to_none=False)
    assert all(p.grad is grad for p, grad in zip(parameters, kept, strict=True))
    assert len(_storages(kept)) == 1
    values = [grad.clone() for grad in kept if grad is not None]
    train(optimizer, parameters, [4])
    messages = _messages(caplog)
    assert [message[:42] for message in messages] == ["fuse_step: the gradients of 7 parameters w"] * check_flatten
    train(optimizer, parameters, range(5, 9), set_to_none=False)
    train(optimizer, parameters, range(9, 12))
    assert not _messages(caplog)
    assert_same(kept, values)  # those who hold old gradients find them as they were
    assert_same([p.detach() for p in parameters], [p.detach() for p in expected])
    assert optimizer._bagua_fused_count == 12


def test_gradients_that_somebody_keeps_are_not_overwritten() -> None:
    parameters = parameters_of()
    optimizer = fuse_optimizer(adam(parameters))
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(6):
        optimizer.zero_grad()
        backward(parameters, step)
        kept += [(p.grad, p.grad.clone()) for p in parameters if p.grad is not None]
        optimizer.fuse_step()
    assert_same(*zip(*kept, strict=True))


def test_gradients_that_are_part_of_something_larger_stay_there() -> None:
    parameters = parameters_of([(3,), (4,), (5,)])
    optimizer = fuse_optimizer(adam(parameters))
    bucket = torch.zeros(12)
    for p, part in zip(parameters, bucket.split([3, 4, 5]), strict=True):
        p.grad = part
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        backward(parameters, step)
        optimizer.fuse_step()
    assert _storages(p.grad for p in parameters) == _storages([bucket])
    assert bucket.count_nonzero() == 12
    assert optimizer._bagua_fused_count == 4


class _Decaying(optim.SGD):
    bagua_elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(p, alpha=0.1)  # as many optimizers do it
                p.sub_(p.grad, alpha=group["lr"])


@in_both_modes
def test_what_the_optimizer_does_to_gradients_is_seen(set_to_none: bool) -> None:
    optimizer = assert_same_training(partial(_Decaying, lr=0.1), set_to_none=set_to_none)
    assert optimizer._bagua_fused_count == 48


def test_a_model_and_its_optimizer_can_be_copied_together() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    optimizer = fuse_optimizer(adam(model.parameters()))
    twin = copy.deepcopy(model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.fuse_step()
    assert not _storages(model.parameters()) & _storages(twin.parameters())
    assert not torch.equal(model[0].weight, twin[0].weight)


# The original's own cases.
def test_mutual_groups_are_those_that_are_whole_in_all_lists() -> None:
    pieces = torch.rand(100).split(10)
    scattered = [torch.rand(10) for _ in range(7)]
    places = [pieces[i] for i in (3, 1, 2, 0, 8, 9)]
    all_but_last = [*places, scattered[0]]
    assert calculate_mutual_groups([all_but_last, scattered]) == []
    assert calculate_mutual_groups([all_but_last, [*places[:4], *scattered[:3]]]) == [[3, 1, 2, 0]]
    assert calculate_mutual_groups([all_but_last, [scattered[0], *places[1:], scattered[1]]]) == [[4, 5]]
    assert calculate_mutual_groups([all_but_last, [*places, scattered[1]]]) == [[3, 1, 2, 0], [4, 5]]
    assert calculate_mutual_groups([]) == []
    with pytest.raises(ValueError, match=r"lists of one length, got \[7, 6\]"):
        calculate_mutual_groups([scattered, places])


def test_on_the_cpu_large_parameters_stay_where_they_are_and_runs_fit_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_fusion, "_CPU_PARAMETER_BYTES", 64 * 4)
    monkeypatch.setattr(_chunk, "_CPU_RUN_BYTES", 100 * 4)

    def make() -> list[nn.Parameter]:
        return parameters_of([(70,), (30,), (64,), (65,), (40,), (5,), (10,)])

    for set_to_none in (True, False):
        expected, weights, optimizer = _trained(adam, make, set_to_none=set_to_none)
        assert_same(weights, expected)
        parameters = optimizer.param_groups[0]["params"]
        assert _storages(parameters[:1]).isdisjoint(_storages(parameters[1:]))
        assert len(_storages(parameters)) == 3
        backward(parameters, 0)
        runs = optimizer._bagua_fused_optimizer.runs(optimizer)
        # 30 + 64 fill a run; with the gaps of alignment so do 40 + 5 + 10.
        assert [[p.numel() for p in run.parameters] for run in runs[0]] == [[30, 64], [40, 5, 10]]
