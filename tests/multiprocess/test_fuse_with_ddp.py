# SPDX-License-Identifier: Apache-2.0
"""Fused optimizers inside DistributedDataParallel, with bagua's hooks, and with with_bagua()."""

import copy
from collections.abc import Callable
from typing import Any

import bagua
import bagua.torch_api
import pytest
import torch
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.contrib import fuse_optimizer
from bagua.torch_api.contrib.fuse.optimizer import is_fused_optimizer
from hooked_models import SMALL_BUCKETS, loss_of, perceptron, same
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch_api_calls import started

STEPS = 12
WARMUP = 5
# Algorithm, options. Rounds of "async" depend on time, so that only its warm-up can be compared.
ALGORITHMS: list[tuple[str, dict[str, Any]]] = [
    ("gradient_allreduce", {}),
    ("decentralized", {"hierarchical": False}),
    ("low_precision_decentralized", {"hierarchical": False}),
    ("qadam", {"hierarchical": False}),
    ("async", {"warmup_steps": 2 * STEPS}),
]
# Whether the optimizer is fused before the model is wrapped or hooked, and whether gradients become None or zeros.
in_both_orders = pytest.mark.parametrize(("fuse_first", "set_to_none"), [(True, False), (False, True)])
Fuse = Callable[[torch.optim.Optimizer], Any]


def _optimizer_for(model: nn.Module, name: str = "") -> torch.optim.Optimizer:
    # Weights and biases in groups of their own, as they often are for the sake of weight decay.
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases}]
    if name == "qadam":
        return bagua.QAdamOptimizer(groups, lr=0.01, warmup_steps=WARMUP)
    return torch.optim.AdamW(groups, lr=0.01)


def _train(model: nn.Module, optimizer: Any, set_to_none: bool) -> list[Any]:
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, step).backward()
        # Plain steps in between, too.
        fuses = is_fused_optimizer(optimizer) and step % 5 != 3
        optimizer.fuse_step() if fuses else optimizer.step()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    # A copy: the removal of an algorithm changes it.
    return [weights, gradients, copy.deepcopy(optimizer.state_dict()["state"])]


def _is_same_training(run: Callable[[Fuse], tuple[nn.Module, Any]], set_to_none: bool) -> None:
    """`run` builds a model and an optimizer, which it hands through the function that it is given."""
    model, optimizer = run(lambda optimizer: optimizer)
    expected = _train(model, optimizer, set_to_none)
    assert all(weight.isfinite().all() for weight in expected[0].values())
    model, optimizer = run(fuse_optimizer)
    results = _train(model, optimizer, set_to_none)
    for result, other in zip(results, expected, strict=True):
        assert same(result, other)


@in_both_orders
@on_ranks(2)
def test_fused_steps_whose_gradients_are_views_of_ddps_buckets_are_plain_steps(
    fuse_first: bool, set_to_none: bool
) -> None:
    def run(fuse: Fuse) -> tuple[nn.Module, Any]:
        model = perceptron()
        optimizer = _optimizer_for(model)
        if fuse_first:
            optimizer = fuse(optimizer)
        ddp = DDP(model, gradient_as_bucket_view=True, **SMALL_BUCKETS)
        return ddp, optimizer if fuse_first else fuse(optimizer)

    _is_same_training(run, set_to_none)


@in_both_orders
@pytest.mark.parametrize(("name", "options"), ALGORITHMS, ids=[name for name, _ in ALGORITHMS])
@on_ranks(2)
def test_hooks_and_fused_steps_work_together(
    name: str, options: dict[str, Any], fuse_first: bool, set_to_none: bool
) -> None:
    handles = []

    def run(fuse: Fuse) -> tuple[nn.Module, Any]:
        for handle in handles:
            handle.remove()
        ddp = DDP(perceptron(), **SMALL_BUCKETS)
        optimizer = _optimizer_for(ddp, name)
        if fuse_first:
            optimizer = fuse(optimizer)
        handles[:] = [bagua.register_comm_hook(ddp, name, optimizer=optimizer, **options)]
        return ddp, optimizer if fuse_first else fuse(optimizer)

    _is_same_training(run, set_to_none)
    # A hook that had not heard of the fused steps would not have communicated in them.
    assert handles[0].stats()["steps"] == STEPS
    handles[0].remove()


@in_both_orders
@pytest.mark.parametrize("do_flatten", [False, True])
@on_ranks(2)
def test_with_bagua_and_fused_steps_work_together(do_flatten: bool, fuse_first: bool, set_to_none: bool) -> None:
    started()

    def run(fuse: Fuse) -> tuple[nn.Module, Any]:
        model: Any = perceptron()
        optimizer = _optimizer_for(model)
        if fuse_first:
            optimizer = fuse(optimizer)
        model = model.with_bagua([optimizer], Algorithm.init("gradient_allreduce"), do_flatten=do_flatten)
        return model, optimizer if fuse_first else fuse(optimizer)

    _is_same_training(run, set_to_none)
