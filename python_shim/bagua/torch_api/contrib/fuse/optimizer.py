# SPDX-License-Identifier: Apache-2.0
"""Steps of an optimizer that treat many parameters as one.

The names and their meaning are those of the original's document "bagua.torch_api.contrib.fuse.optimizer".
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from bagua._optimizers import ELEMENTWISE
from bagua._torch_private import eager, leave_unwrapped, note_step
from bagua.torch_api.contrib.fuse._run import Run, contiguous_runs, flatten, is_dense, state_key

__all__ = ["fuse_optimizer", "fuse_step", "is_fused_optimizer"]

_logger = logging.getLogger("bagua")
# A step is a row of passes over a run. On the CPU each should find in the cache what the one before has written.
_CPU_BYTES = 4 << 20


class _Fusion:
    """What a fused optimizer has besides."""

    def __init__(self, *, is_elementwise: bool) -> None:
        self.is_elementwise = is_elementwise
        # Parameters that were flattened, in the order of memory.
        self.flattened: list[list[Parameter]] = []
        self._fingerprint: list[list[tuple[Any, ...]]] = []
        self._runs: list[list[Run]] = []

    def flatten(self, optimizer: Optimizer) -> None:
        """Move the parameters of each group, dtype and device together, but for those whose memory others share."""
        users: defaultdict[int, int] = defaultdict(int)
        for group in optimizer.param_groups:
            for p in group["params"]:
                users[p.untyped_storage().data_ptr()] += 1
        for group in optimizer.param_groups:
            alike: defaultdict[Any, list[Parameter]] = defaultdict(list)
            for p in group["params"]:
                if is_dense(p) and users[p.untyped_storage().data_ptr()] == 1:
                    alike[p.dtype, p.device].append(p)
            for parameters in alike.values():
                if len(parameters) > 1:
                    flatten(parameters)
                    self.flattened.append(parameters)

    def _check(self) -> None:
        """Log a warning, once, where flattened parameters have left their memory."""
        moved = [p for part in self.flattened if [*contiguous_runs(part)] != [part] for p in part]
        if moved:
            _logger.warning(
                "fuse_step: %d parameters no longer lie in the memory they were flattened in, as after "
                "`parameter.data = ...`: those that do not follow each other are stepped one by one",
                len(moved),
            )
            self.flattened = []

    def runs(self, optimizer: Any) -> list[list[Run]]:
        """Return, for each group, what is stepped as one; the same as before where nothing has changed."""
        if not self.is_elementwise:
            return [[] for _ in optimizer.param_groups]
        fingerprint = [
            [(id(p), p.data_ptr(), p.grad is not None and (p.grad.layout, p.grad.dtype)) for p in group["params"]]
            for group in optimizer.param_groups
        ]
        if fingerprint != self._fingerprint or not all(
            run.is_intact(optimizer.state) for runs in self._runs for run in runs
        ):
            self._check()
            self._runs = [self._find(group, optimizer.state) for group in optimizer.param_groups]
            self._fingerprint = fingerprint
        return self._runs

    def _find(self, group: dict[str, Any], states: dict[Tensor, dict[str, Any]]) -> list[Run]:
        if group.get("differentiable"):
            return []
        alike: defaultdict[Any, list[Parameter]] = defaultdict(list)
        for p in group["params"]:
            # A gradient of another kind, such as a sparse one, is for the optimizer's own step.
            if p.grad is not None and p.grad.layout == torch.strided and p.grad.dtype == p.dtype:
                alike[state_key(p, states)].append(p)
        alike.pop(None, None)
        return [
            Run(part, states)
            for parameters in alike.values()
            for part in contiguous_runs(parameters, _CPU_BYTES if parameters[0].device.type == "cpu" else math.inf)
        ]


def fuse_optimizer(optimizer: Any, do_flatten: bool = True, check_flatten: bool = True) -> Any:
    """Let an optimizer update many parameters as one: a handful of operations per step instead of a set for each.

    `optimizer.fuse_step()` then does, in float32 and float64 to the bit, what `optimizer.step()` would have done. The
    two can be mixed, and `state_dict()`, `load_state_dict()`, learning rate schedulers and step hooks work as before.
    For a GradScaler or a trainer, which call `step` themselves, write `optimizer.step = optimizer.fuse_step`.

    Args:
        optimizer: any. Fused are SGD, Adam, AdamW, Adamax, NAdam, RAdam, Adagrad, Adadelta, RMSprop, Rprop and ASGD of
            torch, and classes with the attribute `bagua_elementwise = True`, which says that they update each element
            of a parameter by itself. For others, such as LAMB, which looks at norms of a parameter, `fuse_step` is
            `step`, and a warning says so (logger "bagua").
        do_flatten: move the parameters of a group to one piece of memory, which resets their data pointers; they keep
            their identity, values and strides. Without it, only what lies side by side anyway is fused.
        check_flatten: log a warning where parameters have left that memory. Only with `do_flatten`.

    Returns:
        The same optimizer, with the method `fuse_step`.

    Raises:
        RuntimeError: it has been fused before.
        TypeError: it is no optimizer.

    Example::

        >>> import torch
        >>> from bagua.torch_api.contrib import fuse_optimizer
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.Adadelta(model.parameters())
        >>> optimizer = fuse_optimizer(optimizer, do_flatten=True)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.fuse_step()
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"fuse_optimizer: optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
    if is_fused_optimizer(optimizer):
        raise RuntimeError("trying to fuse an optimizer twice!")
    kind = type(optimizer)
    is_elementwise = bool(getattr(kind, "bagua_elementwise", kind in ELEMENTWISE))
    if not is_elementwise:
        _logger.warning(
            "fuse_optimizer does not know whether %s updates each element of a parameter by itself, so its fuse_step() "
            "is step(). If it does, set the class attribute `bagua_elementwise = True`",
            kind.__qualname__,
        )
    fusion = _Fusion(is_elementwise=is_elementwise)
    if do_flatten and is_elementwise:
        fusion.flatten(optimizer)
    if not check_flatten:
        fusion.flattened = []
    optimizer._bagua_fusion = fusion  # type: ignore[attr-defined]
    # On the class, as in the original: a bound method in the optimizer itself would be a circle of references, which
    # keeps the memory of the model until Python looks for such circles.
    kind.fuse_step = fuse_step  # type: ignore[attr-defined]
    return optimizer


def fuse_step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Take one step, with parameters that follow each other in memory treated as one.

    Where there are none this is `step()`. The storage of parameters stays as it is, and step hooks run as in `step()`.

    Args:
        optimizer: a fused optimizer.
        closure: evaluates the model and returns the loss; called once, before the update.

    Returns:
        What the closure returned; without one, what `step()` returns.

    Raises:
        RuntimeError: the optimizer is not fused.

    Example::

        >>> import torch
        >>> weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
        >>> optimizer = fuse_optimizer(torch.optim.SGD(weights, lr=0.5))
        >>> for weight in weights:
        ...     weight.grad = torch.ones_like(weight)
        >>> fuse_step(optimizer, closure=lambda: "loss")
        'loss'
        >>> weights[1].tolist()
        [0.5, 0.5, 0.5]
    """
    if not is_fused_optimizer(optimizer):
        raise RuntimeError("fuse_step needs an optimizer that went through fuse_optimizer()")
    # What a learning rate scheduler has step() note.
    note_step(optimizer)
    return _step(optimizer, *(() if closure is None else (closure,)))


def is_fused_optimizer(optimizer: Any) -> bool:
    """Return whether the optimizer went through `fuse_optimizer`. Copies of a fused optimizer are not fused.

    Example::

        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
        >>> is_fused_optimizer(optimizer), is_fused_optimizer(fuse_optimizer(optimizer))
        (False, True)
    """
    return hasattr(optimizer, "_bagua_fusion")


# Schedulers wrap `optimizer.step` to learn of steps. In its place this needs no wrapper, and no warning either.
leave_unwrapped(fuse_step)


@eager
@Optimizer.profile_hook_step
def _step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Take the step between the pre- and post-hooks, as torch's own are called."""
    fusion: _Fusion = optimizer._bagua_fusion
    step = type(optimizer).step
    # Without the hooks, which run around the fused step.
    step = step.__wrapped__ if getattr(step, "hooked", False) else step
    if not fusion.is_elementwise:
        return step(optimizer, *(() if closure is None else (closure,)))
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    with torch.no_grad():
        runs = fusion.runs(optimizer)
        with _in_place_of_parameters(optimizer, runs):
            result = step(optimizer)
    return result if closure is None else loss


@contextmanager
def _in_place_of_parameters(optimizer: Any, runs: list[list[Run]]) -> Iterator[None]:
    """Show the optimizer each run as one parameter."""
    shown = [group["params"] for group in optimizer.param_groups]
    try:
        for group, group_runs in zip(optimizer.param_groups, runs, strict=True):
            fused = {id(p) for run in group_runs for p in run.parameters}
            group["params"] = [run.flat for run in group_runs] + [p for p in group["params"] if id(p) not in fused]
            for run in group_runs:
                run.before_step(optimizer.state)
        yield
    finally:
        for group, parameters, group_runs in zip(optimizer.param_groups, shown, runs, strict=True):
            group["params"] = parameters
            for run in group_runs:
                run.after_step(optimizer.state)
