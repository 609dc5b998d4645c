# SPDX-License-Identifier: Apache-2.0
"""Where fused optimizers put parameters, and what they leave where it is."""

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
    Factory,
    assert_same,
    assert_same_both_ways,
    assert_same_training,
    backward,
    fused,
    in_both_modes,
    parameters_of,
    storages_of,
    take_step,
    train,
    two_groups,
)
from torch import Tensor, nn, optim

pytestmark = pytest.mark.any_device

adam = partial(optim.Adam, lr=0.05, weight_decay=0.1)
sgd = partial(optim.SGD, lr=0.05, momentum=0.9)
with_either = pytest.mark.parametrize("config", [adam, sgd], ids=["Adam", "SGD"])


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
    assert len(storages_of(parameters[:4])) == len(storages_of(parameters[4:])) == 1
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
    assert storages_of(parameters) == storages_of([shared])


@in_both_modes
@with_either
def test_gradients_side_by_side_are_used_where_they_are(config: Any, set_to_none: bool) -> None:
    def run(kind: Factory) -> tuple[Any, Any]:
        weights, gradients = torch.ones(30), torch.zeros(30)
        parameters = _slices(weights)
        optimizer: Any = kind(parameters)
        for step in range(5):
            gradients.copy_(torch.arange(30.0) + step)
            for p, g in zip(parameters, _slices(gradients), strict=True):
                p.grad = g.data
            take_step(optimizer)
        assert storages_of(p.grad for p in parameters) == storages_of([gradients])
        return [weights], optimizer

    optimizer = assert_same_both_ways(config, run)
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

    def run(kind: Factory) -> tuple[Any, Any]:
        parameters = make()
        optimizer = kind(parameters)
        train(optimizer, parameters, range(20), set_to_none=set_to_none)
        return parameters, optimizer

    optimizer = assert_same_both_ways(config, run)
    assert optimizer._bagua_fused_count == 20
    tied = optimizer.param_groups[0]["params"]
    assert tied[0].data_ptr() == tied[2].data_ptr()


def test_a_parameter_that_is_used_twice_in_the_model_is_stepped_once() -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(2)
        first, last = nn.Linear(5, 5), nn.Linear(5, 5)
        last.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), last)

    def run(kind: Factory) -> tuple[Any, Any]:
        net = model()
        optimizer: Any = kind(net.parameters())
        for step in range(10):
            optimizer.zero_grad()
            net(torch.full((2, 5), float(step))).square().sum().backward()
            take_step(optimizer)
        assert net[2].weight is net[0].weight
        return list(net.parameters()), optimizer

    optimizer = assert_same_both_ways(adam, run)
    assert optimizer._bagua_fused_count == 10


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@with_either
def test_a_parameter_that_is_given_twice_is_stepped_twice(config: Any) -> None:
    def make() -> list[Tensor]:
        parameters = parameters_of()
        return [*parameters, parameters[1]]

    def run(kind: Factory) -> tuple[Any, Any]:
        parameters = make()
        optimizer: Any = kind(parameters)
        for step in range(10):
            optimizer.zero_grad()
            backward(parameters[:-1], step)
            take_step(optimizer)
        return parameters, optimizer

    optimizer = assert_same_both_ways(config, run)
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
        p.share_memory_()  # type: ignore[no-untyped-call]
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
    def run(kind: Factory) -> tuple[Any, Any]:
        parameters = _odd_parameters()
        strides = [p.stride() for p in parameters]
        optimizer: Any = kind(parameters)
        for step in range(20):
            optimizer.zero_grad(set_to_none=set_to_none)
            backward(parameters[:-1], step)
            parameters[-1].grad = torch.tensor([0.3 - step * 1j, 0.1])
            take_step(optimizer)
        assert strides == [p.stride() for p in parameters]
        return parameters, optimizer

    optimizer = assert_same_both_ways(config, run)
    assert optimizer._bagua_fused_count == 20


@with_either
def test_a_gradient_in_another_order_of_memory_is_stepped_by_itself(config: Any) -> None:
    def run(kind: Factory) -> tuple[Any, Any]:
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
        return parameters, optimizer

    optimizer = assert_same_both_ways(config, run)
    assert optimizer._bagua_fused_count == 6


@with_either
def test_parts_of_limited_size_are_moved_one_after_the_other(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fusion, "_CHUNK_BYTES", 200)
    optimizer = assert_same_training(config)
    assert optimizer._bagua_fused_count == 24 * 2
    assert len(storages_of(optimizer.param_groups[0]["params"])) > 1


# The original's own cases.
def test_mutual_groups_are_those_that_are_whole_in_all_lists() -> None:
    pieces = torch.split(torch.rand(100), 10)
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

    optimizer = assert_same_training(adam, make=make)
    assert optimizer._bagua_fused_count == 24 * 2
    parameters = make()
    optimizer = fuse_optimizer(adam(parameters))
    assert len(storages_of(parameters)) == 3
    assert len(storages_of([parameters[0], parameters[3]])) == 2
    backward(parameters, 0)
    runs = optimizer._bagua_fused_optimizer.runs(optimizer)
    # 30 + 64 fill a run; with the gaps of alignment so do 40 + 5 + 10.
    assert [[p.numel() for p in run.parameters] for run in runs[0]] == [[30, 64], [40, 5, 10]]


@pytest.mark.parametrize("do_flatten", [True, False])
def test_separate_memory_that_lies_side_by_side_by_chance_is_not_taken_for_one(do_flatten: bool) -> None:
    def pieces(array: Any) -> list[Tensor]:
        return [torch.from_numpy(part) for part in (array[:16], array[16:48])]

    weights, gradients = np.ones(48, np.float32), np.ones(48, np.float32)
    fixed = [nn.Parameter(piece) for piece in pieces(weights)]
    free = parameters_of([(16,), (32,)])
    optimizer = fuse_optimizer(optim.SGD([{"params": fixed}, {"params": free}], lr=0.5), do_flatten=do_flatten)
    before = [p.detach().clone() for p in free]
    for p, gradient in zip([*fixed, *free], pieces(gradients) * 2, strict=True):
        p.grad = gradient
    optimizer.fuse_step()
    assert weights.tolist() == [0.5] * 48
    assert_same([p.detach() for p in free], [value - 0.5 for value in before])
    assert optimizer._bagua_fused_count == do_flatten  # the second group


def test_offsets_in_different_memory_are_not_compared() -> None:
    array = np.ones(80, np.float32)
    first, second = torch.from_numpy(array[:16]), torch.from_numpy(array[20:])[16:48]
    parameters = [nn.Parameter(first), nn.Parameter(second)]
    optimizer = fuse_optimizer(optim.SGD(parameters, lr=0.5), do_flatten=False)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.fuse_step()
    assert array.tolist() == [0.5] * 16 + [1.0] * 20 + [0.5] * 32 + [1.0] * 12
    assert optimizer._bagua_fused_count == 0


def test_gradients_side_by_side_in_another_order_are_not_taken_as_they_are() -> None:
    def run(kind: Factory) -> tuple[Any, Any]:
        weights, gradients = torch.ones(34), torch.arange(34.0)
        image = weights[:24].as_strided((2, 3, 2, 2), (12, 1, 6, 3))
        parameters = [nn.Parameter(image), nn.Parameter(weights[24:29]), nn.Parameter(weights[29:])]
        parts = torch.split(gradients, [24, 5, 5])
        for p, part in zip(parameters, parts, strict=True):
            p.grad = part.view(p.shape)
        optimizer = kind(parameters)
        take_step(optimizer)
        take_step(optimizer)
        return parameters, optimizer

    optimizer = assert_same_both_ways(adam, run, fuse=partial(fused, do_flatten=False))
    assert optimizer._bagua_fused_count == 2  # the other two
