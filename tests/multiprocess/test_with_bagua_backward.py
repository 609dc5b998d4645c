# SPDX-License-Identifier: Apache-2.0
"""Backward passes out of the ordinary under with_bagua(): checkpoints, sparse gradients, errors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import Algorithm, AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket
from hooked_models import take_steps
from ranks import on_ranks
from simulations import flat
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_api_calls import wrapped

# What gradient_allreduce does is done by bytegrad, and coded bucket by bucket.
ALGORITHMS = ("bytegrad", "decentralized", "low_precision_decentralized")


def _x(step: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


@dataclass
class Outputs:
    """What a model may return instead of a tensor; cannot be made by replace()."""

    found: dict[str, list[Tensor]]
    label: str = field(init=False, default="")


class Checkpointed(nn.Module):
    """Its last parameters are under a checkpoint: their gradients are the first to come."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.how = how

    def forward(self, x: Tensor) -> Outputs:
        run: Callable[..., Any] = lambda part, *args: part(*args)  # noqa: E731
        if self.how != "plain":
            run = lambda part, *args: checkpoint(part, *args, use_reentrant=self.how == "reentrant")  # noqa: E731
        return Outputs({"inside": [run(self.c, run(self.b, self.a(x)))]})


@pytest.mark.parametrize("name", ALGORITHMS)
@on_ranks(2)
def test_checkpoints_inside_the_model_change_nothing(name: str) -> None:
    def loss(model: Any, step: int) -> Tensor:
        result: Tensor = model(_x(step)).found["inside"][0].square().mean()
        return result

    plain, *others = [Checkpointed(how) for how in ("plain", "not reentrant", "reentrant")]
    for model in (plain, *others):
        take_steps(model, wrapped(model, name, hierarchical=False), range(3), loss)
    assert all(torch.equal(flat(model.parameters()), flat(plain.parameters())) for model in others)


@pytest.mark.parametrize("name", ALGORITHMS)
@on_ranks(2)
def test_a_model_may_be_checkpointed_as_a_whole(name: str) -> None:
    results = []
    for how in ("plain", "not reentrant", "reentrant"):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        optimizer = wrapped(model, name, hierarchical=False)
        for step in range(3):
            optimizer.zero_grad()
            x = _x(step).requires_grad_()
            y = model(x) if how == "plain" else checkpoint(model, x, use_reentrant=how == "reentrant")
            y.square().mean().backward()  # type: ignore[union-attr]
            optimizer.step()
        results.append(flat(model.parameters()))
        if how == "not reentrant":
            assert model.bagua_train_step_counter == 3, "the second forward of a step is no step"
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.b, checkpoint(self.b, self.a(x), use_reentrant=True), use_reentrant=True)


@on_ranks(1)
def test_a_parameter_of_two_reentrant_checkpoints_is_told() -> None:
    model = Shared()
    wrapped(model)
    with pytest.raises(RuntimeError, match=r"come to parameter 'b\.\w+' twice.*use_reentrant=False"):
        model(_x(0)).sum().backward()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("in the middle of backward")


class FailsOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z: Tensor = self.b(Fails.apply(y) if self.fails else y)  # type: ignore[no-untyped-call]
        return z


@on_ranks(2)
def test_training_goes_on_after_a_backward_that_raised_on_all_ranks() -> None:
    results = []
    for fails in (False, True):
        model = FailsOnce()
        optimizer = wrapped(model, hierarchical=False)
        for step in range(4):
            optimizer.zero_grad()
            if fails and step == 1:
                model.fails = True
                with pytest.raises(ArithmeticError):
                    model(_x(step)).sum().backward()
                model.fails = False
                optimizer.zero_grad()
            model(_x(step)).square().mean().backward()
            optimizer.step()
        results.append(flat(model.parameters()))
    assert torch.equal(results[0], results[1])


@on_ranks(2)
def test_autograd_grad_communicates_nothing() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    wrapped(model)
    x = _x(0).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert model.bagua_algorithm.hook.stats()["rounds"] == 0, "autograd.grad() leaves parameters alone"  # type: ignore[union-attr]
    (model(x).square().mean() + gradient.square().mean()).backward()
    assert model.bagua_algorithm.hook.stats()["rounds"] == 1  # type: ignore[union-attr]


class Words(nn.Module):
    """Each rank leaves one of its embeddings out."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(10, 3, sparse=sparse)
        self.bags = nn.EmbeddingBag(10, 3, sparse=sparse, mode="sum")
        self.tied = nn.Embedding(10, 3, sparse=sparse)
        self.head = nn.Linear(3, 10, bias=False)
        self.head.weight = self.tied.weight  # dense and sparse gradients add up to a dense one

    def forward(self, index: Tensor) -> Tensor:
        first = self.words(index) if dist.get_rank() == 0 else self.bags(index.view(1, -1))
        y: Tensor = self.head(first + self.tied(index))
        return y


class OwnImpl(AlgorithmImpl):
    """The mean, with a Python operation, whose thread must not reorder what the ranks send."""

    def init_operations(self, bagua_module: nn.Module, bucket: BaguaBucket) -> None:
        bucket.clear_ops().append_python_op(lambda name: None).append_centralized_synchronous_op()


class OwnAlgorithm(Algorithm):
    def reify(self, process_group: Any) -> OwnImpl:
        return OwnImpl(process_group)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gradient_allreduce", {}),
        ("gradient_allreduce", {"average": False}),
        ("own", {}),
        ("bytegrad", {"hierarchical": False}),
        ("decentralized", {"hierarchical": False}),
        ("low_precision_decentralized", {"hierarchical": False}),
        ("async", {"warmup_steps": 3}),
    ],
    ids=str,
)
@on_ranks(2)
def test_sparse_gradients_of_embeddings(name: str, options: dict[str, Any]) -> None:
    results = []
    for sparse in (False, True):
        model = Words(sparse)
        optimizer = wrapped(model, OwnAlgorithm() if name == "own" else name, **options)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.tensor([1, step, 4 + dist.get_rank()])).square().mean().backward()
            if sparse and name not in ("decentralized", "low_precision_decentralized"):
                assert model.words.weight.grad is not None
                assert model.words.weight.grad.is_sparse, "an optimizer for sparse gradients can be used"
            optimizer.step()
        results.append(flat(model.parameters()))
        if name == "async":
            model.bagua_algorithm.abort(model)  # type: ignore[operator, union-attr]
    if name in ("gradient_allreduce", "own", "async"):
        # The same additions in another order, in float32.
        torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
    assert results[1].isfinite().all()
