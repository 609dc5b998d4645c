# SPDX-License-Identifier: Apache-2.0
"""How the gradients of a model that `fully_shard` has sharded come to an algorithm, and go back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bagua._native import _C
from bagua._sharded_model import ShardedModel
from bagua._torch_private import (
    after_fsdp_backward,
    at_end_of_backward,
    backward_id,
    comm_of_fsdp,
    eager,
    has_all_reduce_hook,
    is_fsdp_root,
    is_view_of_buffer,
    local_part,
    parameters_being_reduced,
    set_replica_group,
    shape_in_buffer,
    was_gathered,
    watch_fsdp_reductions,
)


class Replicas(dist.ProcessGroup):
    """Stands where FSDP2 all-reduces over the group of ranks with the same shards: an algorithm reduces instead."""

    def __init__(self, stock: dist.ProcessGroup, reduction: ShardReduction) -> None:
        super().__init__(stock.rank(), stock.size())
        self.stock = stock
        self._reduction = reduction

    # torch looks up what it knows of a group, such as its backend for the text of an error.
    def __eq__(self, other: object) -> bool:
        return other is self or other is self.stock

    def __hash__(self) -> int:
        return hash(self.stock)

    def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        """Called by `dist.all_reduce`, which waits for what it returns."""
        [flat] = tensors
        return self._reduction.start(flat, flat, options.reduceOp)


class Scatter:
    """Stands where FSDP2 reduce-scatters one group of parameters: an algorithm reduces instead."""

    def __init__(self, group: Any, reduction: ShardReduction) -> None:
        self._group = group
        self._reduction = reduction
        self.stock = comm_of_fsdp(group, "reduce_scatter")

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for FSDP2."""
        memory: Tensor = self.stock.allocate(size, dtype=dtype, device=device)
        return memory

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Called by FSDP2, which takes the result for complete on the current stream."""
        return self._reduction.start(input_tensor, output_tensor, op, self._group.gradient_divide_factor)


class _Started:
    """What `dist.all_reduce` waits for; done already, or left to the end of the backward."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class _Pending:
    """An exchange that nobody has waited for, and where FSDP2 has its result."""

    def __init__(self, work: dist.Work, result: Tensor | None = None, parameters: Sequence[Any] = ()) -> None:
        self._work = work
        self._result = result
        self._parameters = parameters

    def finish(self) -> None:
        """Wait, and see to it that the gradients are what has been reduced."""
        self._work.wait()
        if self._result is None:
            return
        memory = self._result.untyped_storage().data_ptr()
        gradients = [p.sharded_param.grad for p in self._parameters if p.sharded_param.grad is not None]
        for gradient in map(local_part, gradients):
            if gradient.numel() and gradient.untyped_storage().data_ptr() != memory:
                raise RuntimeError(
                    f"bagua.fsdp: the gradient of a parameter of shape {tuple(gradient.shape)} was copied before it "
                    "was reduced: what copies it has to come after backward()"
                )


class ShardReduction:
    """Hands what FSDP2 is about to reduce to an algorithm, in buckets of one group of parameters each.

    A step is a backward in which something is reduced. Its exchanges are waited for at the end of the backward, unless
    FSDP2 goes on computing with the result before. On a mesh of two dimensions a bucket is what FSDP2 has
    reduce-scattered, and is reduced in place. On a mesh of one dimension it holds a part for each rank, and the
    algorithm takes what is in each for a gradient of its own.

    `after_backward` is called at the end of each such backward.
    """

    def __init__(self, model: ShardedModel, hook: _C.Hook, after_backward: Callable[[], None] | None) -> None:
        self._hook = hook
        self._model = model
        self._after_backward = after_backward
        self._positions: dict[Hashable, int] = {parameter: i for i, parameter in enumerate(model.parameters)}
        # Of parameters that have been reduced before: with which others, in what dtype.
        self._buckets: dict[int, tuple[torch.dtype, tuple[int, ...]]] = {}
        # Of the step at hand; empty between two steps.
        self._seen: set[int] = set()
        self._pending: list[_Pending] = []
        # The backward that will end the step. An error may have kept the last one from it.
        self._ending = 0
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Take the place of FSDP2's exchange between the ranks of the model's group."""
        watch_fsdp_reductions()
        self._undo = [after_fsdp_backward(module, self._at_end) for module in self._model.modules]
        # Before FSDP2 gathers.
        self._undo.append(self._model.whole.register_forward_pre_hook(self._before_forward, prepend=True).remove)
        for group in self._model.groups:
            if self._model.is_hybrid:
                set_replica_group(group, Replicas(self._model.group, self))
                self._undo.append(partial(set_replica_group, group, self._model.group))
            else:
                self._undo.append(self._model.put_comm(group, "reduce_scatter", Scatter(group, self)))

    def detach(self) -> None:
        for undo in reversed(self._undo):
            undo()

    @eager
    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._model.check_placed()
        if torch.is_inference_mode_enabled() and not any(map(was_gathered, self._model.parameters)):
            raise ValueError(
                "bagua.fsdp: the first forward of the model is under torch.inference_mode(), in which FSDP2 would make "
                "tensors for its weights that no training can change: evaluate under torch.no_grad(), which Lightning "
                "does with Trainer(inference_mode=False)"
            )

    def start(self, flat: Tensor, result: Tensor, op: Any, factor: float | None = None) -> _Started:
        """Reduce what FSDP2 has put into a flat tensor; `result` is the same, or takes this rank's part of it.

        `op` is what FSDP2 wants: a mean, a sum, or a sum divided by `factor`, if the user has set that.
        """
        if not backward_id():
            raise ValueError(
                "bagua.fsdp: gradients are reduced outside of a backward, as torch's pipeline parallelism does and "
                "set_manual_backward_finalization(True) asks for: that is not supported"
            )
        if not self._seen:
            self._begin_step()
        parameters = parameters_being_reduced()
        positions, gradients = self._gradients_in(flat, parameters)
        if not self._seen.isdisjoint(positions):
            # Reduced once more in the same backward: an algorithm takes that for another step.
            self._end_step()
        is_mean = op == dist.ReduceOp.AVG
        waits_later = flat.is_cpu and is_mean and all(is_view_of_buffer(p, flat.dtype) for p in parameters)
        if not waits_later:
            self._wait()
        if self._model.is_hybrid:
            work = self._hook.reduce_bucket(flat, gradients, is_first=not self._seen, is_last=False)
        else:
            work = self._hook.reduce_to_parts(flat, result, gradients, is_first=not self._seen)
        self._seen.update(positions)
        self._buckets.update(dict.fromkeys(positions, (flat.dtype, tuple(positions))))
        # Of hosts that train on their own there is no work.
        if work is not None and waits_later:
            self._pending.append(_Pending(work, result, parameters))
        elif work is not None:
            work.wait()
        if not is_mean:
            is_sum = op == dist.ReduceOp.SUM
            result.mul_(self._model.group.size() / (1 if is_sum or factor is None else factor))
        return _Started()

    def _gradients_in(self, flat: Tensor, parameters: Sequence[Any]) -> tuple[list[int], list[tuple[int, Tensor]]]:
        """Return the positions of parameters, and their gradients in the flat tensor, part by part."""
        if any(parameter not in self._positions for parameter in parameters):
            raise RuntimeError(
                "bagua.fsdp: the model has parameters that it did not have at compress(): call handle.remove() and it "
                "again"
            )
        positions = [self._positions[parameter] for parameter in parameters]
        return positions, self._views(flat, positions)

    def _views(self, flat: Tensor, positions: Sequence[int]) -> list[tuple[int, Tensor]]:
        shapes = [shape_in_buffer(self._model.parameters[position]) for position in positions]
        lengths = [shape.numel() for shape in shapes]
        parts, count = self._model.parts, len(self._model.parameters)
        if not positions or parts * sum(lengths) != flat.numel():
            raise RuntimeError(
                f"bagua.fsdp: FSDP2 reduces {flat.numel()} elements of {len(positions)} parameters, which have "
                f"{parts * sum(lengths)}: this version of torch, {torch.__version__}, is not supported"
            )
        views = torch.split(flat, parts * lengths)
        names = [part * count + position for part in range(parts) for position in positions]
        return [(name, view.view(shape)) for name, view, shape in zip(names, views, parts * shapes, strict=True)]

    def _begin_step(self) -> None:
        self._model.check_placed()
        if any(has_all_reduce_hook(group) for group in self._model.groups):
            raise ValueError(
                "bagua.fsdp: set_all_reduce_hook() has given the model a hook, which would see gradients before they "
                "are reduced: remove one of the two"
            )
        if not any(is_fsdp_root(module) for module in self._model.modules):
            raise ValueError(
                "bagua.fsdp: the model given to compress() is a part of one that fully_shard has sharded as a whole, "
                "at whose end backwards end: give compress() the outermost module"
            )

    def _at_end(self) -> None:
        # Of several parts of the model, each may end the backward for itself.
        if self._seen and self._ending != backward_id():
            self._ending = backward_id()
            at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._end_step()
        if self._after_backward is not None:
            self._after_backward()

    def _end_step(self) -> None:
        self._pass_over_unused()
        self._wait()
        self._seen = set()
        self._hook.end_step()

    @property
    def place(self) -> list[list[int]]:
        """Of which shards a state is: the how manieth of how many, and their shapes. For checkpoints."""
        shards = self._model.shards
        return [[shards.rank(), shards.size()], *(list(shape_in_buffer(p)) for p in self._model.parameters)]

    @property
    def buckets(self) -> dict[int, tuple[str, list[int]]]:
        """Which parameters were reduced before, by position: in what dtype, and with which others. For checkpoints."""
        return {one: (str(dtype).split(".")[1], list(others)) for one, (dtype, others) in self._buckets.items()}

    @buckets.setter
    def buckets(self, buckets: Mapping[int, tuple[str, Sequence[int]]]) -> None:
        self._buckets = {one: (getattr(torch, dtype), tuple(others)) for one, (dtype, others) in buckets.items()}

    def _pass_over_unused(self) -> None:
        """Tell error feedback of parameters without a gradient in this step: every step goes on from the one before."""
        if not self._hook.keeps_residuals:
            return
        absent = self._buckets.keys() - self._seen
        # As they travelled last, so that the same rank owns the same elements.
        for bucket in dict.fromkeys(self._buckets[position] for position in self._buckets if position in absent):
            dtype, positions = bucket
            left = [position for position in positions if position in absent and self._buckets[position] == bucket]
            length = sum(shape_in_buffer(self._model.parameters[position]).numel() for position in left)
            flat = torch.empty(self._model.parts * length, dtype=dtype, device=self._model.device)
            work = self._hook.pass_over(flat, self._views(flat, left), not self._model.is_hybrid)
            self._pending.append(_Pending(work))

    def _wait(self) -> None:
        pending, self._pending = self._pending, []
        errors = []
        for exchange in pending:
            try:
                exchange.finish()
            except Exception as error:  # the others write to memory that the caller may free
                errors.append(error)
        if errors:
            raise errors[0]
