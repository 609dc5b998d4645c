# SPDX-License-Identifier: Apache-2.0
"""An algorithm of a user's own, written from the documented interface alone."""

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
    """Averages gradients by a Python function and doubles them, in two buckets of its own choice; notes everything."""

    def __init__(self, process_group: Any, reset_at: int | None) -> None:
        super().__init__(process_group)
        self.calls: list[str] = []
        self.reset_at = reset_at

    def need_reset(self) -> bool:
        self.calls.append("need_reset")
        return self.calls.count("forward") == self.reset_at and self.calls.count("init_tensors") == 1

    def init_tensors(self, bagua_module: Any) -> list[Tensor]:
        self.calls.append("init_tensors")
        return super().init_tensors(bagua_module)

    def tensors_to_buckets(self, tensors: list[list[Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        self.calls.append("tensors_to_buckets")
        flat = [tensor for part in tensors for tensor in part]
        return [
            BaguaBucket(flat[:2], flatten=do_flatten, name="first two", alignment=dist.get_world_size()),
            BaguaBucket(flat[2:], flatten=do_flatten, name="the others"),
        ]

    def init_operations(self, bagua_module: nn.Module, bucket: BaguaBucket) -> None:
        self.calls.append("init_operations")

        def double(bucket_name: str) -> None:
            assert bucket_name == bucket.name
            self.calls.append(f"double {bucket_name}")
            bucket.backend_tensor.mul_(2)

        bucket.clear_ops()
        bucket.append_python_op(double).append_centralized_synchronous_op(average=True)
        bucket.append_python_op(lambda name: self.calls.append(f"after {name}"))

    def init_forward_pre_hook(self, bagua_module: nn.Module) -> Callable[[Any], None]:
        self.calls.append("init_forward_pre_hook")
        return lambda input: self.calls.append("forward")

    def init_backward_hook(self, bagua_module: nn.Module) -> Callable[[str, Tensor], None]:
        self.calls.append("init_backward_hook")
        names = dict(bagua_module.named_parameters())

        def hook(parameter_name: str, parameter: Tensor) -> None:
            assert names[parameter_name] is parameter
            self.calls.append("gradient")
            parameter.bagua_mark_communication_ready()  # type: ignore[attr-defined]

        return hook

    def init_post_backward_hook(self, bagua_module: Any) -> Callable[[], None]:
        self.calls.append("init_post_backward_hook")

        def hook() -> None:
            self.calls.append("post_backward")
            bagua_module._bagua_backend.wait_pending_comm_ops()

        return hook

    def init_post_optimizer_step_hook(self, bagua_module: nn.Module) -> Callable[[Any], None]:
        self.calls.append("init_post_optimizer_step_hook")

        def hook(optimizer: torch.optim.Optimizer) -> None:
            assert isinstance(optimizer, torch.optim.SGD)
            self.calls.append("step")

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


def _check_weights(model: nn.Module, steps: int) -> None:
    """Expect those of SGD with twice the mean gradient, up to the rounding of some steps of order 1."""
    expected = perceptron()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.05)
    take_steps(expected, optimizer, range(steps), lambda model, step: 2 * mean_loss_of(model, step))
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-5, atol=1e-6)


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
    assert all(impl.calls.count(stage) == 1 for stage in STAGES), impl.calls
    assert impl.calls.count("init_operations") == 2
    assert impl.calls[:4] == ["init_tensors", "tensors_to_buckets", "init_operations", "init_operations"]
    for what in ("forward", "post_backward", "step", "double first two", "after the others"):
        assert impl.calls.count(what) == steps, impl.calls
    assert impl.calls.count("gradient") == 6 * steps
    first = impl.calls.index("double first two")
    assert impl.calls.index("after first two", first) < impl.calls.index("double the others", first)
    _check_weights(model, steps)


@on_ranks(2)
def test_need_reset_runs_all_stages_again() -> None:
    started()
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.with_bagua([optimizer], CountingAlgorithm(reset_at=2))  # type: ignore[operator]
    impl = model.bagua_algorithm
    assert isinstance(impl, CountingImpl)
    take_steps(model, optimizer, range(4))
    assert all(impl.calls.count(stage) == 2 for stage in STAGES), impl.calls
    for what in ("init_operations", "need_reset", "double the others"):
        assert impl.calls.count(what) == 4, impl.calls
    _check_weights(model, 4)
