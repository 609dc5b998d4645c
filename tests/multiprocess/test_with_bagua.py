# SPDX-License-Identifier: Apache-2.0
"""module.with_bagua() beside bagua's hooks on stock DDP."""

import copy
from typing import Any

import bagua.torch_api
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import Algorithm
from hooked_models import loss_of, mean_loss_of, perceptron, same_everywhere, take_steps
from ranks import on_new_ranks, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_api_calls import started, wrapped

# Enough for every weight to have seen a gradient: a variance of zero is divided by for ever.
WARMUP = 7
# Algorithm, options: those that have the same definition whatever the buckets are.
ALGORITHMS: list[tuple[str, dict[str, Any]]] = [
    ("gradient_allreduce", {}),
    ("bytegrad", {"hierarchical": False}),
    ("decentralized", {"hierarchical": False}),
    ("decentralized", {"hierarchical": False, "peer_selection_mode": "shift_one", "communication_interval": 2}),
    ("low_precision_decentralized", {"hierarchical": False}),
    ("qadam", {"hierarchical": False}),
    ("powersgd", {"start_step": 3, "rank": 2}),
    ("quantized_allreduce", {"hierarchical": False, "residuals": "8bit", "exact": "1d"}),
    ("local_sgd", {"sync_every": 3}),
    ("diloco", {"sync_every": 4, "fragments": 2, "delay": 1, "mixing": 0.25, "codec": "4bit"}),
]


def _optimizer_for(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "qadam":
        return bagua.QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=WARMUP)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _algorithm(name: str, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> Algorithm:
    if name == "qadam":
        return Algorithm.init(name, q_adam_optimizer=optimizer, **options)
    return Algorithm.init(name, **options)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 10) -> list[Tensor]:
    take_steps(model, optimizer, range(steps))
    return [parameter.detach().clone() for parameter in model.parameters()]


def _through_both_doors(name: str, options: dict[str, Any]) -> None:
    started()
    hooked = DistributedDataParallel(perceptron())
    optimizer = _optimizer_for(name, hooked)
    handle = bagua.register_comm_hook(hooked, name, optimizer=optimizer, **options)
    # One bucket, last parameter first: codecs depend on it, and DDP has orders of its own.
    state = handle.state_dict() | {"layout": [[5, 4, 3, 2, 1, 0]]}
    handle.load_state_dict(state)
    reference = _train(hooked, optimizer)
    for do_flatten in (True, False):
        model = perceptron()
        optimizer = _optimizer_for(name, model)
        model.with_bagua([optimizer], _algorithm(name, optimizer, options), do_flatten=do_flatten)  # type: ignore[operator]
        for one, other in zip(_train(model, optimizer), reference, strict=True):
            # The same buckets, hence the same bits.
            assert torch.equal(one, other)


@pytest.mark.parametrize(("name", "options"), ALGORITHMS, ids=lambda value: str(value))
@on_ranks(2)
def test_both_doors_lead_to_the_same_algorithm(name: str, options: dict[str, Any]) -> None:
    _through_both_doors(name, options)


@on_new_ranks(4, env={"BAGUA_HOST_ID": ["a", "a", "b", "b"]})
def test_both_doors_average_gradients_inside_hosts() -> None:
    _through_both_doors("local_sgd", {"sync_every": 3, "hierarchical": True})
    _through_both_doors("diloco", {"sync_every": 4, "fragments": 1, "delay": 0, "hierarchical": True})


@on_ranks(2)
def test_async_is_aborted_and_resumed_through_the_module() -> None:
    model: Any = perceptron()
    optimizer = wrapped(model, "async", sync_interval_ms=1, warmup_steps=2)
    _train(model, optimizer, 5)
    model.bagua_algorithm.abort(model)
    assert same_everywhere(*model.parameters())
    model.bagua_algorithm.resume(model)
    _train(model, optimizer, 3)
    model.bagua_algorithm.abort(model)


@on_ranks(2, timeout=40.0)
def test_rounds_end_through_the_module_with_the_same_weights() -> None:
    model: Any = perceptron()
    optimizer = wrapped(model, "diloco", sync_every=4, fragments=2, delay=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(1, 7):
        optimizer.zero_grad()
        # One rank's gradients overflow: its step counts as well, or the other would wait for it.
        factor = float("inf") if (dist.get_rank(), step) == (1, 3) else 1.0
        scaler.scale(loss_of(model, step) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    for end in ("synchronize", "abort"):
        getattr(model.bagua_algorithm, end)(model)
        assert same_everywhere(*model.parameters())
        model.bagua_algorithm.resume(model)
        _train(model, optimizer, 3)


class Rooted(nn.Module):
    """Has a parameter of its own, one that is never used, and one that only rank 0 uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.scale = nn.Parameter(torch.ones(3))
        self.layer = nn.Linear(3, 3)
        self.unused = nn.Linear(2, 2)
        self.sometimes = nn.Linear(3, 3)
        self.ignored = nn.Linear(3, 3)
        self._bagua_params_and_buffers_to_ignore = ["ignored.weight", "ignored.bias"]

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * self.scale + self.ignored(x)
        return y + self.sometimes(x) if dist.get_rank() == 0 else y


@on_ranks(2)
def test_parameters_of_the_root_unused_and_ignored_ones() -> None:
    model = Rooted()
    ignored = model.ignored.weight.detach().clone()
    reference = copy.deepcopy(model)
    optimizer = wrapped(model)
    assert torch.equal(model.ignored.weight, ignored), "not even broadcast"
    trained = [(n, p) for n, p in model.named_parameters() if not n.startswith("ignored")]
    with torch.no_grad():
        for (_, p), q in zip(trained, [q for n, q in reference.named_parameters() if "ignored" not in n], strict=True):
            q.copy_(p)
    for step in range(3):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        reference.zero_grad()
        reference(x).square().mean().backward()
        for name, parameter in trained:
            local = reference.get_parameter(name).grad
            mean = torch.zeros_like(parameter) if local is None else local.clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(parameter.grad, mean / dist.get_world_size(), rtol=1e-6, atol=1e-7)
        assert torch.equal(model.ignored.weight.grad, reference.ignored.weight.grad)  # type: ignore[arg-type]


@on_ranks(2)
def test_gradients_accumulate_with_and_without_no_sync() -> None:
    for with_no_sync in (True, False):
        model: Any = perceptron()
        wrapped(model)
        expected = perceptron()
        (mean_loss_of(expected, 0) + mean_loss_of(expected, 1)).backward()
        if with_no_sync:
            with model.no_sync():
                with model.no_sync():
                    pass  # whose end is not that of the outer one
                loss_of(model, 0).backward()
            assert not same_everywhere(model[0].bias.grad), "the ranks have communicated"
        else:
            loss_of(model, 0).backward()
        loss_of(model, 1).backward()
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            # Sums of the same four float32 gradients in another order.
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_weights_and_optimizer_state_become_those_of_rank_0() -> None:
    started()
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Linear(4, 3)
    # A group may have no parameter, such as that of those that do not decay.
    optimizer = torch.optim.Adam([{"params": []}, {"params": model.parameters()}], lr=0.1 * (rank + 1))
    for _ in range(rank + 1):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    if rank == 1:  # a rank without state takes rank 0's
        optimizer = torch.optim.Adam([{"params": []}, {"params": model.parameters()}], lr=0.5)
    model.with_bagua([optimizer], Algorithm.init("gradient_allreduce"))  # type: ignore[operator]
    assert optimizer.param_groups[0]["lr"] == 0.1
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert float(state["step"]) == 1
        assert same_everywhere(parameter, state["exp_avg"], state["exp_avg_sq"])


@on_ranks(2)
def test_several_models_with_algorithms_of_their_own() -> None:
    models = [perceptron(), perceptron()]
    optimizers = [
        wrapped(model, name) for model, name in zip(models, ("gradient_allreduce", "decentralized"), strict=True)
    ]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (loss_of(models[0], step) + loss_of(models[1], step)).backward()
        for optimizer in optimizers:
            optimizer.step()
    alone = perceptron()
    for one, other in zip(_train(alone, wrapped(alone), 3), models[0].parameters(), strict=True):
        assert torch.equal(one, other)


@on_ranks(1)
def test_mistakes_are_told() -> None:
    started()
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        frozen.with_bagua([], Algorithm.init("bytegrad"))  # type: ignore[operator]
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="LBFGS"):
        model.with_bagua([torch.optim.LBFGS(model.parameters())], Algorithm.init("bytegrad"))  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"'nonsense'.*bytegrad"):
        Algorithm.init("nonsense")
    model.with_bagua([], Algorithm.init("bytegrad"))  # type: ignore[operator]
    with pytest.raises(TypeError, match="cannot be pickled"):
        copy.deepcopy(model)
