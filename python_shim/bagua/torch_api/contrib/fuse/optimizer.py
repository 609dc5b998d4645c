# SPDX-License-Identifier: Apache-2.0
"""Steps of an optimizer that treat many parameters as one.

The names and their meaning are those of the original's document "bagua.torch_api.contrib.fuse.optimizer".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bagua._eager import disabled
from bagua.optimizers import QAdamOptimizer
from bagua.torch_api.contrib.fuse._chunk import Run
from bagua.torch_api.contrib.fuse._elementwise import check_optimizer
from bagua.torch_api.contrib.fuse._fusion import Fusion
from bagua.torch_api.contrib.fuse._layout import calculate_mutual_groups

__all__ = ["calculate_mutual_groups", "fuse_optimizer", "fuse_step", "is_fused_optimizer"]


def fuse_optimizer(optimizer: Any, do_flatten: bool = True, check_flatten: bool = True) -> Any:
    """Let an optimizer update many parameters as one: a handful of operations per step instead of a set for each.

    `optimizer.fuse_step()` then gives, to the bit, what `optimizer.step()` would have given; the two can be mixed, and
    `state_dict()`, `load_state_dict()`, learning rate schedulers and step hooks work as before. For a GradScaler or a
    trainer, which call `step` themselves, write `optimizer.step = optimizer.fuse_step`.

    Not fused, but stepped one by one, are: parameters that are alone in their group with their dtype and device, 0-dim,
    complex or not dense, that share memory with another tensor, whose gradient is missing or sparse, or that have
    taken another number of steps than their neighbours; groups with `differentiable=True`; on the CPU also parameters
    of more than 256 KiB, whose arithmetic outweighs the calls, groups with `fused=True`, and in general parameters of
    16 bits, for there torch's kernels round the last elements of a tensor otherwise than the rest.
    `optimizer._bagua_fused_count` counts, over all fused steps, the groups in which something was fused.

    With `zero_grad(set_to_none=True)`, torch's default, gradients are copied in each step, into a buffer as large as
    they are; with `zero_grad(set_to_none=False)` they live there.

    Args:
        optimizer: one that treats each element of a parameter by itself, with a state of numbers and of tensors of the
            shape of the parameter. Known are torch's (SGD, Adam, AdamW, Adamax, NAdam, RAdam, Adagrad, Adadelta,
            RMSprop, Rprop, ASGD) and `bagua.QAdamOptimizer`. Any other class, derived from these or not, is tried: a
            copy takes some steps on three small parameters, by themselves and as one, and has to give the same bits.
            A class whose `bagua_elementwise` is True or False is believed, and not tried.
        do_flatten: move the parameters of a group to one piece of memory, which resets their data pointers; they keep
            their identity, values and strides. Without it, only what lies side by side anyway is fused.
        check_flatten: log a warning when weights, gradients or state have left that memory (logger "bagua", once per
            cause and step). They are put back where possible, with or without the warning. Only with `do_flatten`.

    Returns:
        The same optimizer, with the method `fuse_step`.

    Raises:
        RuntimeError: it has been fused before.
        TypeError: not an optimizer, or one whose updates would differ for fused parameters: LBFGS, SparseAdam,
            Adafactor and Muon of torch; LAMB, LARS, Shampoo, SOAP and 8-bit optimizers elsewhere; whatever fails the
            trial.

    Example::

        >>> import torch
        >>> from bagua.torch_api.contrib import fuse_optimizer
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.Adadelta(model.parameters())
        >>> optimizer = fuse_optimizer(optimizer, do_flatten=True)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.fuse_step()
        >>> optimizer._bagua_fused_count
        1
    """
    if is_fused_optimizer(optimizer):
        raise RuntimeError("trying to fuse an optimizer twice!")
    check_optimizer(optimizer)
    fusion = Fusion(do_flatten=do_flatten, check_flatten=do_flatten and check_flatten)
    with torch.no_grad():
        fusion.gather(optimizer)
    fusion.report()
    optimizer._bagua_check_flatten = do_flatten and check_flatten
    optimizer._bagua_fused_count = 0
    optimizer._bagua_fused_optimizer = fusion
    # As torch's own, it calls pre- and post-hooks around the step: those of the optimizer and those of all optimizers.
    optimizer._bagua_step_with_hooks = disabled(Optimizer.profile_hook_step(_step))
    # On the class, as in the original: a bound method in the optimizer itself would be a circle of references, which
    # keeps the memory of the model until Python looks for such circles.
    if not hasattr(optimizer, "fuse_step"):
        type(optimizer).fuse_step = fuse_step  # type: ignore[attr-defined]
    optimizer.register_load_state_dict_post_hook(_expect_new_state)
    return optimizer


def fuse_step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Take one step, with as many parameters as possible treated as one.

    Where nothing can be fused this is `step()`. Step hooks run as in `step()`. Parameters keep their storage, but for
    those that have joined the optimizer, or have been moved by others, since the step before.

    Args:
        optimizer: a fused optimizer.
        closure: evaluates the model and returns the loss; called once, before the update.

    Returns:
        What the closure returned; without one, what `step()` returns.

    Raises:
        RuntimeError: the optimizer is not fused, or keeps a state that cannot be divided among parameters.

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
    optimizer._opt_called = True
    step = optimizer._bagua_step_with_hooks
    return step(optimizer) if closure is None else step(optimizer, closure)


def is_fused_optimizer(optimizer: Any) -> bool:
    """Return whether the optimizer went through `fuse_optimizer`. Copies of a fused optimizer are not fused.

    Example::

        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
        >>> is_fused_optimizer(optimizer), is_fused_optimizer(fuse_optimizer(optimizer))
        (False, True)
    """
    return hasattr(optimizer, "_bagua_fused_optimizer")


# Schedulers wrap `optimizer.step` to learn of steps. In its place this needs no wrapper, and no warning either.
fuse_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def _expect_new_state(optimizer: Optimizer) -> None:
    optimizer._bagua_fused_optimizer.state_was_loaded = True  # type: ignore[attr-defined]


def _step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    fusion: Fusion = optimizer._bagua_fused_optimizer
    with torch.no_grad():
        runs = fusion.runs(optimizer)
    with _in_place_of_parameters(optimizer, runs):
        result = _plain_step(optimizer)
    fusion.after_step()
    optimizer._bagua_fused_count += sum(bool(group_runs) for group_runs in runs)
    return result if closure is None else loss


def _plain_step(optimizer: Optimizer) -> Any:
    """Call the step of the optimizer's class, without the hooks, which run around the fused step."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step(optimizer)


@contextmanager
def _in_place_of_parameters(optimizer: Any, runs: Sequence[Sequence[Run]]) -> Iterator[None]:
    """Show the optimizer the runs instead of the parameters in them."""
    all_runs = [run for group_runs in runs for run in group_runs]
    groups = [(group, group["params"], rs) for group, rs in zip(optimizer.param_groups, runs, strict=True) if rs]
    # States come into being at most where a run has none yet.
    known = set(optimizer.state) if any(run.flat not in optimizer.state for run in all_runs) else None
    handed_out: dict[Tensor, Tensor] = optimizer._handed_out if isinstance(optimizer, QAdamOptimizer) else {}
    handed_out |= {run.flat: run.flat for run in all_runs if run.parameters[0] in handed_out}
    for group, parameters, group_runs in groups:
        fused = {id(p) for run in group_runs for p in run.parameters}
        group["params"] = [run.flat for run in group_runs] + [p for p in parameters if id(p) not in fused]
    try:
        yield
    finally:
        for run in all_runs:
            handed_out.pop(run.flat, None)
        for group, parameters, _ in groups:
            group["params"] = parameters
        states = [optimizer.state.pop(run.flat, None) for run in all_runs]
        with torch.no_grad():
            for run, state in zip(all_runs, states, strict=True):
                run.detach(optimizer.state, state)
        if known is not None:
            _sort_new(optimizer, known)


def _sort_new(optimizer: Optimizer, known: set[Any]) -> None:
    """Put states that are new in the order in which step() would have made them."""
    # A parameter may be given twice.
    for p in dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]):
        if p in optimizer.state and p not in known:
            optimizer.state[p] = optimizer.state.pop(p)
