# SPDX-License-Identifier: Apache-2.0
"""Custom algorithms that go astray are told, and the operation for averages in the background."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import Algorithm, AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.communication import new_group
from hooked_models import loss_of, perceptron
from ranks import on_new_ranks, on_ranks
from torch import Tensor, nn
from torch_api_calls import started


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


@on_ranks(2)
def test_tensors_that_would_never_be_communicated_are_told() -> None:
    started()
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


class TwoStageImpl(MeanImpl):
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


@on_ranks(2)
def test_a_second_stage_may_take_weights_instead_of_gradients() -> None:
    started()
    model = perceptron()
    optimizer = _wrap(TwoStageImpl, model)
    loss_of(model, 0).backward()
    optimizer.step()
    model(torch.zeros(1, 23))
    for parameter in model.parameters():
        assert parameter.bagua_getter_closure() is parameter, "no more its gradient"  # type: ignore[attr-defined]
    assert model.bagua_buckets[0].check_flatten()  # type: ignore[index, union-attr]
    assert torch.equal(model.bagua_buckets[0].slot_at(0), model[0].weight)  # type: ignore[index, union-attr]


class OneByOneImpl(MeanImpl):
    """One bucket per tensor."""

    def tensors_to_buckets(self, tensors: list[list[Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        return [BaguaBucket([t], str(index), do_flatten) for index, t in enumerate(_all(tensors))]


class NotingImpl(OneByOneImpl):
    """Notes the buckets that go, in their order."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.gone: list[str] = []

    def init_operations(self, bagua_module: nn.Module, bucket: BaguaBucket) -> None:
        bucket.clear_ops().append_python_op(self.gone.append).append_centralized_synchronous_op()


def _fail(gradient: Tensor) -> None:
    raise ArithmeticError("a mistake of the user's")


@on_ranks(2)
def test_after_a_backward_that_raised_between_two_buckets_the_first_one_goes_first_again() -> None:
    started()
    model = perceptron()
    _wrap(NotingImpl, model)
    impl = model.bagua_algorithm
    assert isinstance(impl, NotingImpl)
    mistake = next(model.parameters()).register_hook(_fail)
    with pytest.raises(ArithmeticError):
        loss_of(model, 0).backward()
    mistake.remove()
    loss_of(model, 1).backward()
    had_gone = len(impl.gone) - 6
    assert 0 < had_gone < 6
    assert impl.gone[had_gone:] == list("012345")


class FailingOperationImpl(OneByOneImpl):
    """The Python operation of the second bucket fails in the first step."""

    fails = True

    def init_operations(self, bagua_module: nn.Module, bucket: BaguaBucket) -> None:
        def operation(name: str) -> None:
            if self.fails and name == "1":
                raise ArithmeticError("a mistake of the user's")

        bucket.clear_ops().append_python_op(operation).append_centralized_synchronous_op()


@on_ranks(2)
def test_an_operation_that_raises_ends_the_backward_and_not_the_training() -> None:
    started()
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
        torch.testing.assert_close(p.grad, q.grad)


class GroupedImpl(AlgorithmImpl):
    """The mean, over a group that is named: the first two ranks, or the third alone."""

    def init_operations(self, bagua_module: nn.Module, bucket: BaguaBucket) -> None:
        groups = [new_group([0, 1]), new_group([2])]
        bucket.clear_ops().append_centralized_synchronous_op(group=groups[dist.get_rank() // 2])


@on_new_ranks(3, backend="gloo")
def test_operations_on_a_group_of_another_backend_take_its_ranks_and_make_no_group_per_step() -> None:
    started()
    model, alone = perceptron(), perceptron()
    _wrap(GroupedImpl, model)
    for one in (model, alone):
        loss_of(one, 0).backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    is_own = all(torch.equal(p.grad, q.grad) for p, q in pairs)  # type: ignore[arg-type]
    assert is_own == (dist.get_rank() == 2)
    groups = len(dist.distributed_c10d._world.pg_map)
    for step in range(3):
        loss_of(model, step).backward()
    assert len(dist.distributed_c10d._world.pg_map) == groups


class TwoLevelImpl(AlgorithmImpl):
    """The mean inside pairs, and then over the pairs."""

    def init_operations(self, bagua_module: nn.Module, bucket: BaguaBucket) -> None:
        pairs, columns = ([new_group(ranks) for ranks in both] for both in (([0, 1], [2, 3]), ([0, 2], [1, 3])))
        bucket.clear_ops()
        bucket.append_centralized_synchronous_op(group=pairs[dist.get_rank() // 2])
        bucket.append_centralized_synchronous_op(group=columns[dist.get_rank() % 2])


@on_new_ranks(4)
def test_an_operation_on_another_group_begins_when_the_one_before_it_has_ended() -> None:
    started()
    torch.manual_seed(3)
    model = nn.Linear(512, 1024)
    _wrap(TwoLevelImpl, model)
    for step in range(10):
        model.zero_grad()
        model(torch.full((1, 512), 4.0 * step + dist.get_rank())).sum().backward()
        assert torch.equal(model.weight.grad, torch.full((1024, 512), 4.0 * step + 1.5))
