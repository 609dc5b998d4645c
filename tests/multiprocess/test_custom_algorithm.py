# SPDX-License-Identifier: Apache-2.0
"""An algorithm of a user's own, written from the documented interface alone."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import Algorithm, AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket
from hooked_models import loss_of, mean_loss_of, perceptron, take_steps
from ranks import on_ranks
from torch import Tensor, nn
from torch_api_calls import started


class CountingImpl(AlgorithmImpl):
    """Averages gradients by a Python function and doubles them, in two buckets of its own choice; counts everything."""

    def __init__(self, process_group: Any, reset_at: int | None) -> None:
        super().__init__(process_group)
        self.calls: Counter[str] = Counter()
        self.order: list[str] = []
        self.reset_at = reset_at
        self.trained = 0

    def _note(self, what: str) -> None:
        self.calls[what] += 1
        self.order.append(what)

    def need_reset(self) -> bool:
        self._note("need_reset")
        return self.calls["forward"] == self.reset_at and self.calls["init_tensors"] == 1

    def init_tensors(self, bagua_module: Any) -> list[Tensor]:
        self._note("init_tensors")
        return super().init_tensors(bagua_module)

    def tensors_to_buckets(self, tensors: list[list[Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        self._note("tensors_to_buckets")
        flat = [tensor for part in tensors for tensor in part]
        return [
            BaguaBucket(flat[:2], flatten=do_flatten, name="first two", alignment=dist.get_world_size()),
            BaguaBucket(flat[2:], flatten=do_flatten, name="the others"),
        ]

    def init_operations(self, bagua_module: nn.Module, bucket: BaguaBucket) -> None:
        self._note("init_operations")

        def double(bucket_name: str) -> None:
            assert bucket_name == bucket.name
            self._note(f"double {bucket_name}")
            bucket.backend_tensor.mul_(2)

        bucket.clear_ops()
        bucket.append_python_op(double).append_centralized_synchronous_op(average=True)
        bucket.append_python_op(lambda name: self._note(f"after {name}"))

    def init_forward_pre_hook(self, bagua_module: nn.Module) -> Callable[[Any], None]:
        self._note("init_forward_pre_hook")
        return lambda input: self._note("forward")

    def init_backward_hook(self, bagua_module: nn.Module) -> Callable[[str, Tensor], None]:
        self._note("init_backward_hook")
        names = dict(bagua_module.named_parameters())

        def hook(parameter_name: str, parameter: Tensor) -> None:
            assert names[parameter_name] is parameter
            self._note("gradient")
            parameter.bagua_mark_communication_ready()  # type: ignore[attr-defined]

        return hook

    def init_post_backward_hook(self, bagua_module: Any) -> Callable[[], None]:
        self._note("init_post_backward_hook")

        def hook() -> None:
            self._note("post_backward")
            bagua_module._bagua_backend.wait_pending_comm_ops()

        return hook

    def init_post_optimizer_step_hook(self, bagua_module: nn.Module) -> Callable[[Any], None]:
        self._note("init_post_optimizer_step_hook")

        def hook(optimizer: torch.optim.Optimizer) -> None:
            assert isinstance(optimizer, torch.optim.SGD)
            self._note("step")

        return hook


class CountingAlgorithm(Algorithm):
    def __init__(self, reset_at: int | None = None) -> None:
        self.reset_at = reset_at

    def reify(self, process_group: Any) -> CountingImpl:
        return CountingImpl(process_group, self.reset_at)


STAGES = (
    "init_forward_pre_hook",
    "init_backward_hook",
    "init_post_backward_hook",
    "init_post_optimizer_step_hook",
    "init_tensors",
    "tensors_to_buckets",
)


def _expected(steps: int) -> list[Tensor]:
    """Weights after steps with twice the mean gradient, in one process."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    take_steps(model, optimizer, range(steps), lambda model, step: 2 * mean_loss_of(model, step))
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("do_flatten", [True, False], ids=["flat", "scattered"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@on_ranks(2)
def test_stages_and_operations_of_a_custom_algorithm(do_flatten: bool, set_to_none: bool) -> None:
    started()
    steps = 3
    model = perceptron()
    if dist.get_rank() > 0:
        for parameter in model.parameters():
            nn.init.constant_(parameter, 7.0)  # rank 0's weights win
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wrapped = model.with_bagua([optimizer], CountingAlgorithm(), do_flatten=do_flatten)  # type: ignore[operator]
    assert wrapped is model
    impl = model.bagua_algorithm
    assert isinstance(impl, CountingImpl)
    assert [bucket.name for bucket in model.bagua_buckets] == ["first two", "the others"]  # type: ignore[union-attr]
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, step).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(torch.randn(2, 23))  # no stage of training
    assert all(impl.calls[stage] == 1 for stage in STAGES), impl.calls
    assert impl.calls["init_operations"] == 2
    assert impl.order[:4] == ["init_tensors", "tensors_to_buckets", "init_operations", "init_operations"]
    for what in ("forward", "post_backward", "step", "double first two", "after the others"):
        assert impl.calls[what] == steps, impl.calls
    assert impl.calls["gradient"] == 6 * steps
    first = impl.order.index("double first two")
    assert impl.order.index("after first two", first) < impl.order.index("double the others", first)
    # SGD on twice the mean; float32 rounding over three steps of order 1.
    for parameter, reference in zip(model.parameters(), _expected(steps), strict=True):
        torch.testing.assert_close(parameter.detach(), reference, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_need_reset_runs_all_stages_again() -> None:
    started()
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.with_bagua([optimizer], CountingAlgorithm(reset_at=2))  # type: ignore[operator]
    impl = model.bagua_algorithm
    assert isinstance(impl, CountingImpl)
    take_steps(model, optimizer, range(4))
    assert all(impl.calls[stage] == 2 for stage in STAGES), impl.calls
    assert impl.calls["init_operations"] == 4
    assert impl.calls["need_reset"] == 4
    assert impl.calls["double the others"] == 4
    for parameter, reference in zip(model.parameters(), _expected(4), strict=True):
        torch.testing.assert_close(parameter.detach(), reference, rtol=1e-5, atol=1e-6)
