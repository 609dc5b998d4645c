# SPDX-License-Identifier: Apache-2.0
"""What with_bagua() does when it wraps: state, groups, mistakes, once more."""

import copy
import gc
import io
import weakref
from typing import Any

import bagua.torch_api
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import Algorithm, AlgorithmImpl
from hooked_models import mean_loss_of, perceptron, same_everywhere, take_steps
from ranks import on_ranks
from torch import Tensor, nn
from torch_api_calls import started, wrapped


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def _allreduce() -> Algorithm:
    return Algorithm.init("gradient_allreduce")


def _assert_trained_on_the_mean(model: nn.Module, steps: int = 3) -> None:
    """Compare with SGD on the mean of the ranks' gradients, in one process."""
    alone = perceptron()
    take_steps(alone, _sgd(alone), range(steps), mean_loss_of)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        # The same additions in another order, in float32.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_module_keeps_its_name_and_is_averaged_once_however_often_it_is_wrapped() -> None:
    started()
    model = perceptron()
    optimizer = _sgd(model)
    model.bagua_module_name = "mine"  # type: ignore[assignment]
    for step in range(3):
        model.with_bagua([optimizer], _allreduce())  # type: ignore[operator]
        assert model.bagua_module_name == "mine"
        take_steps(model, optimizer, range(step, step + 1))
    _assert_trained_on_the_mean(model)


class FailingImpl(AlgorithmImpl):
    def init_operations(self, bagua_module: nn.Module, bucket: Any) -> None:
        raise ArithmeticError("a mistake of the user's")


class FailingAlgorithm(Algorithm):
    def reify(self, process_group: Any) -> FailingImpl:
        return FailingImpl(process_group)


@on_ranks(2)
def test_a_failure_leaves_no_half_wrapped_module() -> None:
    model = perceptron()
    optimizer = wrapped(model)
    for wrong, problem in (("bytegrad", "'bytegrad'"), (type(_allreduce()), "class"), (None, "None")):
        with pytest.raises(TypeError, match=f"algorithm must be an instance.*{problem}"):
            model.with_bagua([optimizer], wrong)  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"write \[optimizer\]"):
        model.with_bagua(optimizer, _allreduce())  # type: ignore[operator]
    with pytest.raises(TypeError, match="got one of str"):
        model.with_bagua(["sgd"], _allreduce())  # type: ignore[operator]
    take_steps(model, optimizer, range(1))  # the former algorithm is still at work
    with pytest.raises(ArithmeticError):
        wrapped(model, FailingAlgorithm())
    assert not hasattr(model, "bagua_algorithm")
    assert not hasattr(model, "no_sync")
    assert not model._forward_pre_hooks
    model.with_bagua([optimizer], _allreduce())  # type: ignore[operator]
    take_steps(model, optimizer, range(1, 3))
    _assert_trained_on_the_mean(model)


@on_ranks(1)
def test_algorithms_that_act_on_weights_ask_for_all_optimizers() -> None:
    started()
    for name in ("decentralized", "low_precision_decentralized", "async"):
        model = perceptron()
        some = torch.optim.SGD(model[0].parameters(), lr=0.1)  # type: ignore[index, operator]
        for optimizers in ([], [some]):
            with pytest.raises(ValueError, match=f"'{name}' acts on what the optimizers do.*'4.bias'|2.weight"):
                model.with_bagua(optimizers, Algorithm.init(name))  # type: ignore[operator]
        rest = torch.optim.Adam([p for n, p in model.named_parameters() if not n.startswith("0")])
        model.with_bagua([some, rest], Algorithm.init(name))  # type: ignore[operator]
        if name == "async":
            model.bagua_algorithm.abort(model)  # type: ignore[operator, union-attr]
    model = perceptron()
    other = bagua.QAdamOptimizer(model.parameters())
    with pytest.raises(ValueError, match="QAdamOptimizer that is none of the module's optimizers"):
        model.with_bagua([_sgd(model)], Algorithm.init("qadam", q_adam_optimizer=other))  # type: ignore[operator]


class Mixed(nn.Module):
    """Has a frozen layer, weights in channels_last, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.frozen = nn.Conv2d(3, 3, 1).requires_grad_(False)
        self.trained = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        nn.init.constant_(self.norm.running_mean, dist.get_rank())  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.trained(self.frozen(x)))
        return y


@on_ranks(2)
def test_frozen_parameters_buffers_and_memory_formats() -> None:
    started()
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    for do_flatten in (True, False):
        model = Mixed()
        optimizer = _sgd(model)
        model.with_bagua([optimizer], _allreduce(), do_flatten=do_flatten)  # type: ignore[operator]
        assert same_everywhere(model.frozen.weight)
        assert float(model.norm.running_mean[0]) == dist.get_rank(), "with_bagua leaves buffers alone"  # type: ignore[index]
        model(x).square().mean().backward()
        assert model.trained.weight.is_contiguous(memory_format=torch.channels_last)
        gradient = model.trained.weight.grad
        assert gradient is not None
        assert gradient.is_contiguous(memory_format=torch.channels_last)
        assert same_everywhere(gradient)


@on_ranks(2)
def test_ranks_with_weights_laid_out_differently_are_told() -> None:
    started()
    model = nn.Conv2d(3, 4, 3)
    if dist.get_rank() == 1:
        model.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"rank.*float32\[4, 3, 3, 3\]"):
        model.with_bagua([_sgd(model)], _allreduce())  # type: ignore[operator]


@on_ranks(2)
def test_groups_of_torch_and_of_bagua_are_taken() -> None:
    started()
    everyone = list(range(dist.get_world_size()))
    for group in (dist.new_group(everyone), bagua.torch_api.new_group(everyone)):
        model = perceptron()
        optimizer = _sgd(model)
        take_steps(model.with_bagua([optimizer], _allreduce(), process_group=group), optimizer, range(3))  # type: ignore[operator]
        _assert_trained_on_the_mean(model)
    with pytest.raises(TypeError, match="got 'world'"):
        perceptron().with_bagua([], _allreduce(), process_group="world")  # type: ignore[operator]


@on_ranks(2)
def test_a_wrapped_model_is_freed_with_its_last_reference() -> None:
    for name in ("gradient_allreduce", "decentralized"):
        model = perceptron()
        optimizer = wrapped(model, name, hierarchical=False)
        take_steps(model, optimizer, range(2))
        seen = [weakref.ref(model), weakref.ref(model[0].weight)]  # type: ignore[index, arg-type]
        buffer = io.BytesIO()
        torch.save(list(model.parameters()), buffer)  # with the attributes that torch saves of a parameter
        copy.deepcopy(model[0])  # type: ignore[index]
        del model, optimizer
        gc.collect()
        assert [reference() for reference in seen] == [None, None]
