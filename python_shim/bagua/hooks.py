# SPDX-License-Identifier: Apache-2.0
"""Algorithms as communication hooks of stock DistributedDataParallel."""
# No `from __future__ import annotations` here: torch compares the annotations of a hook with the types themselves.

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bagua._attachment import (
    PICKLE_ADVICE,
    Attachment,
    check_model,
    check_optimizer,
    facts_of,
    names_and_roles,
    refuse_uneven_division,
    synchronised_buffers,
    trainable_names,
    trainable_parameters,
    unwrapped,
)
from bagua._buckets import BucketSplitter
from bagua._executors import background_executors_for, executors_for, host_executors_for
from bagua._layers import layers_of
from bagua._native import _C
from bagua.handle import Handle, OptionArgument, OptionValue


def available_algorithms() -> list[str]:
    """Return the names that `register_comm_hook` and `comm_hook` know."""
    return list(_C.algorithm_names())


def _check_ddp(ddp: DistributedDataParallel) -> None:
    if getattr(ddp, "_use_python_reducer", False):
        raise RuntimeError(
            "torch.compile's python_reducer skips C++ communication hooks without a word: set "
            "torch._dynamo.config.optimize_ddp to 'ddp_optimizer' (or True) before wrapping the model"
        )
    if ddp._comm_hooks:
        raise RuntimeError("this model already has a communication hook; DistributedDataParallel takes one")


def _make_hook(
    ddp: DistributedDataParallel,
    name: str,
    options: dict[str, OptionArgument],
    optimizer: torch.optim.Optimizer | None,
    executors: Any,
) -> _C.Hook:
    """Check everything that this rank can see by itself."""
    complete = _C.check_options(name, options)
    _check_ddp(ddp)
    info = _C.algorithm_info(name)
    if info["optimizer"]:
        check_optimizer(ddp, optimizer, name, info["optimizer"])
        check_model(ddp, name, info, is_hierarchical=bool(complete.get("hierarchical")))
    parameters = trainable_parameters(ddp)
    hook = _C.Hook(name, complete, executors, parameters, ddp.static_graph)
    hook.use_parameters(names_and_roles(ddp.module, parameters))
    hook.use_model(layers_of(trainable_names(ddp)), synchronised_buffers(ddp))
    return hook


def register_comm_hook(
    ddp: DistributedDataParallel,
    name: str,
    optimizer: torch.optim.Optimizer | None = None,
    process_group: dist.ProcessGroup | None = None,
    **options: OptionArgument,
) -> Handle:
    """Let an algorithm communicate for a DDP model. Collective: every rank calls it, before the first step.

    The model's process group may be of backend "bagua" or of a stock one ("gloo", "nccl").

    Args:
        ddp: the model, wrapped in DistributedDataParallel.
        name: one of `available_algorithms()`.
        optimizer: the model's optimizer, for algorithms that change weights or momentum: "decentralized",
            "low_precision_decentralized", "async", "local_sgd", "diloco" (any optimizer) and "qadam"
            (`bagua.QAdamOptimizer`). One that accelerate or Lightning has wrapped will do.
        process_group: where to communicate; by default the model's own group.
        **options: the algorithm's options, see each algorithm's page.

    Raises:
        ValueError: an unknown name or option (the message lists the valid ones), a value out of range, an optimizer
            that is missing or not the model's, or ranks that disagree.
        TypeError: an option of a wrong type, or a model that is not wrapped.
        RuntimeError: the model has a hook already, or would skip it.
    """
    if not isinstance(ddp, DistributedDataParallel):
        # Without a model no other rank can be told: all that is wrong comes out here.
        _C.check_options(name, options)
        raise TypeError(
            f"expected a model wrapped in torch.nn.parallel.DistributedDataParallel, got {type(ddp).__qualname__}"
        )
    optimizer = unwrapped(optimizer)
    parameters = trainable_parameters(ddp)
    device = parameters[0].device
    group = process_group or ddp.process_group
    main = executors_for(group, device)
    try:
        hook = _make_hook(ddp, name, options, optimizer, main)
    except Exception:
        # The other ranks may have found nothing wrong and wait for this one.
        _C.refuse_registration(main, str(device))
        raise
    text = "; ".join(f"{p.dtype}{list(p.shape)}" for p in parameters)
    hook.agree(main, text, facts_of(optimizer), str(device))
    info = _C.algorithm_info(name)
    if info["runs_in_background"]:
        hook.use_background(background_executors_for(group, device))
    if hook.host_ranks:
        hook.use_host(host_executors_for(group, device, hook.host_ranks))
    _C.register_hook(ddp.reducer, hook)
    if hook.wants_small_buckets:
        BucketSplitter(ddp, parameters)
    attachment = None
    if info["optimizer"]:
        assert optimizer is not None
        attachment = Attachment(hook, main, ddp, optimizer, info)
    else:
        ddp.register_forward_pre_hook(refuse_uneven_division)
    handle = Handle(hook, attachment)
    # What torch's own method does besides: for its logs, and so that a copy of the model is noticed.
    ddp._comm_hooks.append((_run_hook, handle))
    if ddp.logger is not None:
        ddp.logger._set_comm_hook_name(f"bagua_{name}")
    return handle


class HookState:
    """The state of the two-argument form: an algorithm that finds its process group at the first bucket."""

    def __init__(self, name: str, options: dict[str, OptionValue], process_group: dist.ProcessGroup | None) -> None:
        self._name = name
        self._options = options
        self._process_group = process_group
        self._hook: _C.Hook | None = None

    def run(self, bucket: dist.GradBucket) -> torch.futures.Future[list[torch.Tensor]]:
        """Start the reduction of one bucket."""
        if self._hook is None:
            device = bucket.buffer().device
            group = self._process_group or dist.group.WORLD
            if group is None:
                raise RuntimeError("a bagua communication hook needs an initialised process group")
            self._hook = _C.Hook(self._name, self._options, executors_for(group, device))
        return self._hook.run(bucket)

    def stats(self) -> dict[str, Any]:
        """As `Handle.stats()`; empty before the first bucket."""
        return {} if self._hook is None else self._hook.stats()

    def __reduce__(self) -> str:
        raise TypeError(PICKLE_ADVICE)


def _first_tensor(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]


def _run_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    # then(): the future of a Python hook has to hold a Python object.
    return state.run(bucket).then(_first_tensor)


def comm_hook(
    name: str, process_group: dist.ProcessGroup | None = None, **options: OptionArgument
) -> tuple[HookState, Any]:
    """Return `(state, hook)` for `ddp.register_comm_hook(state, hook)` and Lightning's `ddp_comm_state/ddp_comm_hook`.

    Prefer `register_comm_hook`: it checks that the ranks agree, and its hook needs no Python on the way of a gradient.

    Args:
        name: one of `available_algorithms()`; one that needs the optimizer has to go through `register_comm_hook`.
        process_group: where to communicate; by default the default group at the time of the first step.
        **options: the algorithm's options.

    Raises:
        ValueError, TypeError: as `register_comm_hook`.
    """
    complete = _C.check_options(name, options)
    if _C.algorithm_info(name)["optimizer"]:
        raise ValueError(f"algorithm {name!r} acts on what the optimizer does: use bagua.register_comm_hook")
    return HookState(name, complete, process_group), _run_hook
