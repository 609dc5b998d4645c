# SPDX-License-Identifier: Apache-2.0
"""weights="cache" of bagua.fsdp.compress: what is gathered over the network, how often; what may change meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import bagua
import pytest
import torch
import torch.distributed as dist
from bagua._weight_cache import CachedGather
from bagua._weight_changes import WeightChanges
from hooked_models import same_everywhere
from ranks import on_ranks
from sharded_models import POLICIES, check_equal, compressed, loss_of, made_model, mesh_of, outcome, sharded, trained
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

# What a group with frozen weights gathers ends with its number, in float32.
NUMBER = 2


@contextmanager
def gathered() -> Iterator[list[int]]:
    """The elements that this rank gives to each gather over the network."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, sizes = getattr(dist, name), []

    def counted(output: torch.Tensor, input: torch.Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(input.numel())
        return gather(output, input, *args, **options)

    with mock.patch.object(dist, name, counted):
        yield sizes


def rows(numel: int, length: int) -> int:
    """Elements of a rank's part of a parameter, with the rows that even it out."""
    return -(-length // 4) * (numel // length)


def sizes_of(model: Any, *, trained: bool) -> int:
    return sum(rows(p.numel(), len(p)) for p in model.parameters() if p.requires_grad == trained)


@on_ranks(4)
def test_weights_are_gathered_once_a_step_and_frozen_ones_once_ever() -> None:
    model, mesh = made_model(), mesh_of("line")
    of_trained, of_frozen = sizes_of(model, trained=True), sizes_of(model, trained=False)
    head = sum(rows(p.numel(), len(p)) for p in model.head.parameters())
    with gathered() as sizes:
        trained(sharded(model, mesh))
        # The root, which has the head, stays whole until the backward.
        assert sum(sizes) == 3 * (2 * (of_trained + of_frozen) - head)
        sizes.clear()
        ours = compressed(sharded(model, mesh), weights="cache")
        trained(ours)
        assert sum(sizes) == 3 * of_trained + of_frozen + NUMBER


def fresh(gather: CachedGather, *size: Any, **kind: Any) -> torch.Tensor:
    """As on a device, where what was gathered is copied back into it."""
    memory: torch.Tensor = gather._former.allocate(*size, **kind)
    return memory


@pytest.mark.parametrize("allocate", [CachedGather.allocate, fresh])
@on_ranks(4)
def test_of_a_group_with_frozen_and_trained_weights_the_trained_ones_are_gathered(allocate: Any) -> None:
    model, mesh = made_model(), mesh_of("line")
    model.blocks[0].inner.requires_grad_(False)
    model.blocks[1].norm.requires_grad_(False)
    of_trained, of_frozen = sizes_of(model, trained=True), sizes_of(model, trained=False)
    expected = trained(sharded(model, mesh))
    with gathered() as sizes, mock.patch.object(CachedGather, "allocate", allocate):
        own = trained(compressed(sharded(model, mesh), weights="cache"))
        # Of three groups with frozen weights: two in each step, and once the third.
        assert sum(sizes) == 3 * of_trained + of_frozen + NUMBER * 7
    check_equal(own, expected)


def stock_and_ours(weights: str = "cache") -> tuple[Any, Any]:
    """A model whose weights FSDP2 gathers by itself, and the same one with ours."""
    model, mesh = made_model(), mesh_of("line")
    return sharded(model, mesh), compressed(sharded(model, mesh), weights=weights)


@on_ranks(4)
def test_weights_that_are_frozen_after_a_step_are_gathered_once_more() -> None:
    losses = []
    for one in stock_and_ours():
        # It does not change the version of what it updates.
        optimizer = torch.optim.SGD(one.parameters(), lr=1e-3, foreach=True)
        loss_of(one, 0).backward()
        optimizer.step()
        one.blocks[0].requires_grad_(False)
        losses.append(loss_of(one, 1).detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", ["cache", "int8"])
@on_ranks(4)
def test_frozen_weights_that_changed_are_gathered_again(weights: str) -> None:
    model, mesh = made_model(), mesh_of("line")
    # Which has a single row, so that three ranks see nothing of it.
    model.blocks[0].scale.requires_grad_(False)

    def one_alone(one: Any) -> None:
        one.frozen.weight.mul_(2)

    # The others change without a version.
    def many_at_once(one: Any) -> None:
        torch._foreach_mul_([one.frozen.weight, one.blocks[0].scale], 2.0)

    def by_data(one: Any) -> None:
        one.blocks[0].scale.data.mul_(2)

    def shard(one: Any) -> None:
        one.blocks[0].scale.to_local().mul_(2)

    stock, ours = sharded(model, mesh), compressed(sharded(model, mesh), weights=weights)
    for change in (one_alone, many_at_once, by_data, shard):
        for one in (stock, ours):
            trained(one, range(1), rate=0.0)
            with torch.no_grad():
                change(one)
        torch.testing.assert_close(outcome(ours), outcome(stock), rtol=1e-5, atol=1e-6)


@on_ranks(4)
def test_only_the_first_forward_after_a_step_asks_for_changes_of_frozen_weights() -> None:
    for are_frozen in (True, False):
        model = sharded(made_model(), mesh_of("line")).requires_grad_(not are_frozen)
        model.head.requires_grad_(True)
        ours = compressed(model, weights="cache")
        optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3, foreach=True)
        loss_of(ours, 0).backward()
        optimizer.step()
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as asked:
            for steps in (1, 2):
                for part in range(2):
                    loss_of(ours, steps, part).backward()
                    assert asked.call_count == (steps if are_frozen else 0)
                optimizer.step()


@on_ranks(4)
def test_a_change_that_other_ranks_cannot_know_of_is_an_error_with_its_name_and_a_remedy() -> None:
    mesh = mesh_of("line")
    ours = compressed(sharded(made_model(), mesh), weights="cache")
    trained(ours)
    loss_of(ours, 0)
    ours.frozen.weight.to_local().data.mul_(2)
    with pytest.raises(RuntimeError, match=r"frozen.weight was changed since weights='cache' .* \(copy_, lerp_\)"):
        loss_of(ours, 0)
    ours = compressed(sharded(made_model(), mesh), weights="cache")
    loss = loss_of(ours, 0)
    ours.blocks[1].inner.weight.to_local().data.mul_(2)
    with pytest.raises(RuntimeError, match=r"blocks.1.inner.weight was changed between its forward and its backward"):
        loss.backward()


@on_ranks(4)
def test_what_a_backward_prefetches_without_its_forward_is_gathered_anew() -> None:
    def step(model: Any, number: int) -> None:
        loss_of(model, number, skipped=0 if number == 1 else -1).backward()

    stock, ours = stock_and_ours()
    for one in (stock, ours):
        one.blocks[1].set_modules_to_backward_prefetch([one.blocks[0]])
    check_equal(trained(ours, step=step), trained(stock, step=step))


class Twins(nn.Module):
    """Two frozen layers of one size, and one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(8, 8).requires_grad_(False) for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.frozen, self.head):
            x = layer(x)
        return x


@on_ranks(4)
def test_frozen_weights_that_were_changed_on_some_ranks_alone_are_an_error() -> None:
    mesh, model = mesh_of("line"), Twins()
    for layer in model.frozen:
        fully_shard(layer, mesh=mesh)
    ours = compressed(fully_shard(model, mesh=mesh), weights="cache")
    ours(torch.ones(1, 8)).sum().backward()
    ours(torch.ones(1, 8))
    # Each rank gathers one of two layers, which are as long.
    with torch.no_grad():
        ours.frozen[0 if dist.get_rank() == 2 else 1].weight.mul_(2)
        # Of which the ranks have told each other before.
        with mock.patch.object(dist, "all_reduce"), pytest.raises(RuntimeError, match="on some of them alone"):
            ours(torch.ones(1, 8))


@contextmanager
def coded() -> Iterator[list[int]]:
    """The elements that this rank gives to each gather of coded differences."""
    gather, sizes = bagua._native._C.compressed_all_gather, []

    def counted(executors: Any, output: torch.Tensor, input: torch.Tensor, *args: Any) -> Any:
        sizes.append(input.numel())
        return gather(executors, output, input, *args)

    with mock.patch.object(bagua._native._C, "compressed_all_gather", counted):
        yield sizes


@pytest.mark.parametrize(("codec", "error"), [("int8", 1e-3), ("4bit", 2e-2)])
@on_ranks(4)
def test_coded_differences_follow_the_weights_with_the_same_bits_on_all_ranks(codec: str, error: float) -> None:
    model, mesh = made_model(), mesh_of("line")
    of_trained, of_frozen = sizes_of(model, trained=True), sizes_of(model, trained=False)
    ours = sharded(model, mesh)
    handle = bagua.fsdp.compress(ours, "gradient_allreduce", weights=codec)
    with gathered() as whole, coded() as sizes:
        own = trained(ours, range(6))
        assert sum(whole) == of_trained + of_frozen + NUMBER
        assert sum(sizes) == 5 * of_trained
        stats = handle.stats()
        assert stats["gathers"] == len(whole) + len(sizes)
        bits = 4 if codec == "4bit" else 8
        assert (
            0 < stats["gathered_bytes"] - 4 * sum(whole) - sum(sizes) * bits // 8 < 0.1 * sum(sizes) + 100 * len(sizes)
        )
        handle.reset()
        assert handle.stats()["gathered_bytes"] == 0
    expected = trained(sharded(model, mesh), range(6))
    # The first step has gathered the weights themselves.
    for step, near in zip(own.gradients, expected.gradients, strict=True):
        for name, gradient in step.items():
            assert (gradient - near[name]).norm() <= error * near[name].norm() + 1e-6, name
    with torch.no_grad():
        assert same_everywhere(ours(torch.ones(1, 67)))


@on_ranks(4)
def test_without_a_step_of_an_optimizer_no_difference_is_gathered() -> None:
    ours = compressed(sharded(made_model(), mesh_of("line")), weights="int8")
    trained(ours)
    with gathered() as whole, coded() as sizes:
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        for steps in (1, 2):
            # Of two blocks and the head.
            loss_of(ours, 3).backward()
            assert len(sizes) == 3 * steps
            loss_of(ours, 4).backward()
            assert len(sizes) == 3 * steps
            optimizer.step()
        assert len(whole) == 0
        loss_of(ours, 5).backward()
    ours.head.weight.to_local().data.mul_(2)
    with pytest.raises(RuntimeError, match=r"head.weight was changed since weights='int8' .* without a step"):
        loss_of(ours, 5)


class Setting(torch.optim.Optimizer):
    """Its step sets all weights to a value."""

    def __init__(self, parameters: Any, value: float) -> None:
        super().__init__(parameters, {})
        self.value = value

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.fill_(self.value)


@pytest.mark.parametrize("codec", ["int8", "1bit"])
@on_ranks(4)
def test_after_weights_that_were_not_finite_the_next_ones_are_gathered_in_full(codec: str) -> None:
    stock, ours = stock_and_ours(codec)
    for one in (stock, ours):
        trained(one, range(2))
        for value in (torch.inf, 0.01):
            # Of the head, rank 3 has fewer rows than the others, of the scale rank 0 has all.
            optimizer = Setting([*one.head.parameters(), one.blocks[0].scale], value)
            optimizer.step()
            assert outcome(one).isfinite().all() == (value == 0.01)
    # The block was trained by coded differences, but for what was set.
    with coded() as sizes:
        torch.testing.assert_close(outcome(ours), outcome(stock), rtol=1e-2, atol=1e-2)
        assert not sizes
        trained(ours, range(2))
        assert sizes


@pytest.mark.parametrize("way", ["load", "copy", "data", "many at once"])
@on_ranks(4)
def test_weights_that_were_changed_after_a_step_are_gathered_in_full(way: str) -> None:
    """Averages that are swapped in, and the weights that are swapped back."""
    whole, ours = stock_and_ours("1bit")

    def swap(one: Any, weights: dict[str, Any]) -> None:
        if way == "load":
            one.load_state_dict(weights)
        for name, parameter in one.named_parameters():
            if way == "copy":
                parameter.copy_(weights[name])
            elif way == "data":
                parameter.data.copy_(weights[name])
        if way == "many at once":
            own = dict(one.named_parameters())
            torch._foreach_mul_(list(own.values()), 0.0)
            torch._foreach_add_(list(own.values()), [weights[name] for name in own])

    trained(ours)
    with torch.no_grad():
        last = {name: parameter.detach().clone() for name, parameter in ours.named_parameters()}
        averages = {name: 0.5 * one for name, one in last.items()}
        swap(ours, averages)
        whole.load_state_dict(averages)
        torch.testing.assert_close(outcome(ours), outcome(whole), rtol=1e-5, atol=1e-6)
        if way in ("load", "copy"):
            swap(ours, last)
            whole.load_state_dict(last)
            torch.testing.assert_close(outcome(ours), outcome(whole), rtol=1e-5, atol=1e-6)
    if way in ("load", "copy"):
        with torch.no_grad():
            # Before a step, which would hide it.
            for one in (ours, whole):
                one.zero_grad()
                swap(one, averages)
                torch.optim.SGD(one.parameters(), lr=1e-3).step()
        torch.testing.assert_close(outcome(ours), outcome(whole), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", range(1, 6))
def test_a_change_of_the_last_number_of_a_shard_is_seen(length: int, dtype: torch.dtype) -> None:
    data = torch.ones(length, dtype=dtype)
    shard: Any = nn.Parameter(data)
    shard._local_tensor = data
    parameter = SimpleNamespace(sharded_param=shard, _sharded_param_data=data, padded_sharded_param_size=data.shape)
    changes = WeightChanges(SimpleNamespace(fsdp_params=[parameter]), has_digests=True)
    changes.note()
    assert changes.moved_here() is None
    data[-1] += 1
    assert changes.moved_here() == 0


@on_ranks(4)
def test_the_memory_that_it_takes_is_said_and_given_back() -> None:
    model, mesh = made_model(), mesh_of("line")
    ours = sharded(model, mesh)
    handle = bagua.fsdp.compress(ours, "gradient_allreduce", weights="cache")
    assert handle.stats()["memory"] == {"gathered weights": 0}
    trained(ours)
    whole = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in model.head.parameters())
    kept = handle.stats()["memory"]["gathered weights"]
    assert 4 * whole <= kept < 1.1 * 4 * whole
    handle.remove()
    assert handle.stats()["memory"] == {"gathered weights": 0}
    with gathered() as sizes:
        trained(ours, range(1))
    assert sum(sizes) > sizes_of(model, trained=True) + sizes_of(model, trained=False)


@on_ranks(4)
def test_what_does_not_go_together_with_it_is_refused_with_its_name() -> None:
    model, mesh = made_model(), mesh_of("line")
    with_integers = made_model()
    with_integers.levels = nn.Parameter(torch.arange(8), requires_grad=False)

    def own_gather() -> Any:
        class Own(DefaultAllGather):
            pass

        one = sharded(model, mesh)
        one.blocks[0].set_custom_all_gather(Own())
        return one

    cases: list[tuple[Any, str, str]] = [
        (sharded(model, mesh), "int9", "expected None, 'cache' or a codec"),
        (fully_shard(made_model(), mesh=mesh, reshard_after_forward=2), "cache", "reshard_after_forward"),
        (own_gather(), "cache", "set_custom_all_gather"),
        (sharded(with_integers, mesh, **POLICIES["bfloat16"]), "int8", "one dtype of floating point"),
        (sharded(model, mesh_of("hybrid")), "cache", "mesh of one dimension"),
    ]
    for given, weights, words in cases:
        with pytest.raises(ValueError, match=words):
            bagua.fsdp.compress(given, weights=weights)
