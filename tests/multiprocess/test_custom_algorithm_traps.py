# SPDX-License-Identifier: Apache-2.0
"""Custom algorithms that go astray are told, and the operation for averages in the background."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import bagua.torch_api
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import Algorithm, AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket
from hooked_models import loss_of, perceptron
from ranks import RankPool, run_ranks
from torch import Tensor, nn


def _start() -> None:
    if not bagua.torch_api.is_initialized():
        bagua.torch_api.init_process_group()


class Made(Algorithm):
    """A recipe of the class given."""

    def __init__(self, impl: type[AlgorithmImpl]) -> None:
        self.impl = impl

    def reify(self, process_group: Any) -> AlgorithmImpl:
        return self.impl(process_group)


def _wrap(impl: type[AlgorithmImpl], model: nn.Module, do_flatten: bool = True) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.with_bagua([optimizer], Made(impl), do_flatten=do_flatten)  # type: ignore[operator]
    return optimizer


class MeanImpl(AlgorithmImpl):
    def init_operations(self, bagua_module: nn.Module, bucket: BaguaBucket) -> None:
        bucket.clear_ops().append_centralized_synchronous_op()


def _all(tensors: list[list[Tensor]]) -> list[Tensor]:
    return [tensor for part in tensors for tensor in part]


class LeavesOutImpl(MeanImpl):
    def tensors_to_buckets(self, tensors: list[list[Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        return [BaguaBucket(_all(tensors)[:2], "first", do_flatten)]


class TwiceImpl(MeanImpl):
    def tensors_to_buckets(self, tensors: list[list[Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        return [BaguaBucket(_all(tensors), "all", do_flatten), BaguaBucket(_all(tensors)[:1], "again", do_flatten)]


class TwiceInOneImpl(MeanImpl):
    def tensors_to_buckets(self, tensors: list[list[Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        return [BaguaBucket(_all(tensors) * 2, "all", do_flatten)]


class ForgetfulImpl(MeanImpl):
    """Marks all but one."""

    def init_backward_hook(self, bagua_module: nn.Module) -> Callable[[str, Tensor], None]:
        def hook(parameter_name: str, parameter: Any) -> None:
            if parameter_name != "2.bias":
                parameter.bagua_mark_communication_ready()

        return hook


def _astray() -> None:
    _start()
    with pytest.raises(ValueError, match=r"LeavesOutImpl left out 4 of the tensors.*'2.bias'"):
        _wrap(LeavesOutImpl, perceptron())
    with pytest.raises(ValueError, match=r"'4.bias' is in bucket 'again' and in bucket 'all'"):
        _wrap(TwiceImpl, perceptron())
    with pytest.raises(ValueError, match="bucket 'all' has a tensor twice"):
        _wrap(TwiceInOneImpl, perceptron())
    model = perceptron()
    _wrap(ForgetfulImpl, model)
    for step in range(2):  # the second backward finds nothing of the first
        with pytest.raises(RuntimeError, match=r"not communicated.*turn of bucket '0', of which '2.bias'"):
            loss_of(model, step).backward()


def test_tensors_that_would_never_be_communicated_are_told(rank_pools: dict[int, RankPool]) -> None:
    rank_pools[2].run(_astray)


class TwoStageImpl(AlgorithmImpl):
    """Gradients in the first step, then weights, which are registered as the documents do: without closures."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.forwards = 0

    def need_reset(self) -> bool:
        self.forwards += 1
        return self.forwards == 2

    def init_tensors(self, bagua_module: Any) -> list[Tensor]:
        if self.forwards < 2:
            return super().init_tensors(bagua_module)
        name = bagua_module.bagua_module_name
        return [p.ensure_bagua_tensor(n, name) for n, p in bagua_module.bagua_build_params()]

    def init_operations(self, bagua_module: nn.Module, bucket: BaguaBucket) -> None:
        bucket.clear_ops().append_centralized_synchronous_op()


def _two_stages() -> None:
    _start()
    model = perceptron()
    optimizer = _wrap(TwoStageImpl, model)
    loss_of(model, 0).backward()
    optimizer.step()
    model(torch.zeros(1, 23))
    for parameter in model.parameters():
        assert parameter.bagua_getter_closure() is parameter, "no more its gradient"  # type: ignore[attr-defined]
    assert model.bagua_buckets[0].check_flatten()  # type: ignore[index, union-attr]
    assert torch.equal(model.bagua_buckets[0].slot(model[0].weight), model[0].weight)  # type: ignore[index, union-attr]


def test_a_second_stage_may_take_weights_instead_of_gradients(rank_pools: dict[int, RankPool]) -> None:
    rank_pools[2].run(_two_stages)


class FailingOperationImpl(AlgorithmImpl):
    """One bucket per tensor; the Python operation of the second fails in the first step."""

    fails = True

    def tensors_to_buckets(self, tensors: list[list[Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        return [BaguaBucket([t], str(index), do_flatten) for index, t in enumerate(_all(tensors))]

    def init_operations(self, bagua_module: nn.Module, bucket: BaguaBucket) -> None:
        def operation(name: str) -> None:
            if self.fails and name == "1":
                raise ArithmeticError("a mistake of the user's")

        bucket.clear_ops().append_python_op(operation).append_centralized_synchronous_op()


def _failing_operation() -> None:
    _start()
    model = perceptron()
    optimizer = _wrap(FailingOperationImpl, model)
    with pytest.raises(ArithmeticError):
        loss_of(model, 0).backward()
    model.bagua_algorithm.fails = False  # type: ignore[union-attr]
    reference = perceptron()
    of_reference = _wrap(MeanImpl, reference)
    for one, its_optimizer in ((model, optimizer), (reference, of_reference)):
        its_optimizer.zero_grad()
        loss_of(one, 1).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        torch.testing.assert_close(p.grad, q.grad)


def test_an_operation_that_raises_ends_the_backward_and_not_the_training(rank_pools: dict[int, RankPool]) -> None:
    rank_pools[2].run(_failing_operation)


class GroupedImpl(AlgorithmImpl):
    """The mean, over a group that is named."""

    def init_operations(self, bagua_module: nn.Module, bucket: BaguaBucket) -> None:
        bucket.clear_ops().append_centralized_synchronous_op(group=self.process_group)


def _operations_over_gloo() -> None:
    _start()
    model = perceptron()
    _wrap(GroupedImpl, model)
    loss_of(model, 0).backward()
    groups = len(dist.distributed_c10d._world.pg_map)
    for step in range(3):
        loss_of(model, step).backward()
    assert len(dist.distributed_c10d._world.pg_map) == groups


def test_operations_on_a_group_of_another_backend_make_no_group_per_step() -> None:
    run_ranks(2, _operations_over_gloo, backend="gloo")


class BackgroundImpl(AlgorithmImpl):
    """Weights of all layers in one bucket, averaged whenever the test asks for it."""

    def init_tensors(self, bagua_module: Any) -> list[Tensor]:
        name = bagua_module.bagua_module_name
        return [p.ensure_bagua_tensor(n, name) for n, p in bagua_module.bagua_build_params()]

    def tensors_to_buckets(self, tensors: list[list[Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        return [BaguaBucket(_all(tensors), "weights", do_flatten)]

    def init_operations(self, bagua_module: nn.Module, bucket: BaguaBucket) -> None:
        self.operation = bucket.clear_ops().append_asynchronous_model_average_op(peer_selection_mode="all")

    def init_backward_hook(self, bagua_module: nn.Module) -> Callable[[str, Tensor], None]:
        return lambda name, parameter: None


def _round(model: Any) -> None:
    for tensor in model.bagua_buckets[0].tensors:
        tensor.bagua_mark_communication_ready_without_synchronization()
    model._bagua_backend.wait_pending_comm_ops()


def _gathered(weights: Tensor) -> Tensor:
    everywhere = torch.empty(dist.get_world_size(), weights.numel())
    dist.all_gather_into_tensor(everywhere, weights)
    return everywhere


def _background() -> None:
    _start()
    model, rank = perceptron(), dist.get_rank()
    _wrap(BackgroundImpl, model)
    operation = model.bagua_algorithm.operation  # type: ignore[union-attr]
    weights: Tensor = model.bagua_buckets[0].backend_tensor  # type: ignore[index, union-attr]
    weights.add_(rank)
    mean = _gathered(weights).mean(0)
    _round(model)
    # weights + (mean - weights) in float32.
    torch.testing.assert_close(weights, mean, rtol=1e-6, atol=1e-6)

    # What is learnt while a round is under way stays: (mean - copy) sums up to zero over the ranks.
    before = _gathered(weights).sum(0)
    operation.lock_weight()
    with ThreadPoolExecutor(1) as beside:
        round_beside = beside.submit(_round, model)
        held = weights.clone()
        dist.barrier()
        assert torch.equal(weights, held), "a round changes nothing while the weights are held"
        weights.add_(10.0 + rank)
        operation.unlock_weight()
        round_beside.result()
    learnt = sum(10 + peer for peer in range(dist.get_world_size()))
    torch.testing.assert_close(_gathered(weights).sum(0), before + learnt, rtol=1e-5, atol=1e-5)

    # Ranks that want to end at different times end together.
    rounds = 0
    while operation.get_status():
        if rounds == 2 * (rank + 1):
            operation.abort()
        _round(model)
        rounds += 1
    assert torch.equal(_gathered(torch.tensor([float(rounds)])), torch.full((dist.get_world_size(), 1), float(rounds)))
    weights.add_(rank)
    operation.reset()
    mean = _gathered(weights).mean(0)
    _round(model)
    torch.testing.assert_close(weights, mean, rtol=1e-6, atol=1e-6)


def test_weights_are_drawn_together_in_the_background(rank_pools: dict[int, RankPool]) -> None:
    rank_pools[2].run(_background)


def _background_mistakes() -> None:
    _start()
    with pytest.raises(ValueError, match=r"'weights' is not flattened.*do_flatten=True"):
        _wrap(BackgroundImpl, perceptron(), do_flatten=False)
    bucket = BaguaBucket([torch.ones(2)], "one", flatten=True)
    with pytest.raises(ValueError, match="'all', got 'ring'"):
        bucket.append_asynchronous_model_average_op("ring")


def test_background_averages_need_flattened_weights(rank_pools: dict[int, RankPool]) -> None:
    rank_pools[1].run(_background_mistakes)
