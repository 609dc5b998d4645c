# SPDX-License-Identifier: Apache-2.0
"""Algorithms as communication hooks of stock DistributedDataParallel."""
# No `from __future__ import annotations` here: torch compares the annotations of a hook with the types themselves.

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bagua._executors import executors_for
from bagua._native import _C

OptionValue = bool | int | float | str

_PICKLE_ADVICE = (
    "a model with a bagua communication hook cannot be pickled or deep-copied: the copy would train without the hook. "
    "Save model.module.state_dict() and the handle's state_dict() instead"
)


def available_algorithms() -> list[str]:
    """Return the names that `register_comm_hook` and `comm_hook` know."""
    return list(_C.algorithm_names())


class Handle:
    """What `register_comm_hook` returns: figures and control of one algorithm at work on one model."""

    def __init__(self, hook: _C.Hook) -> None:
        self._hook = hook

    @property
    def algorithm(self) -> str:
        """The algorithm's name."""
        return self._hook.name

    @property
    def options(self) -> dict[str, OptionValue]:
        """All of the algorithm's options, with the defaults filled in."""
        return self._hook.options

    def stats(self) -> dict[str, Any]:
        """Return what this rank has done so far.

        Returns:
            `algorithm`; `steps` and `buckets` (counts); `logical_bytes` (gradients handed to the hook, in bytes);
            `wire_bytes` (bytes sent to other ranks for them); `seconds` (stage -> seconds of the communication thread;
            on CUDA the time to enqueue the stage).
        """
        return self._hook.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint of this rank needs: the algorithm, its options and its state."""
        return {"algorithm": self.algorithm, "options": self.options, "state": {}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict()` returned on the same rank.

        Raises:
            ValueError: the state is of another algorithm or of other options.
        """
        own = self.state_dict()
        for key in ("algorithm", "options"):
            if state_dict.get(key) != own[key]:
                raise ValueError(
                    f"the checkpoint was written with {key} {state_dict.get(key)!r}, this hook has {own[key]!r}"
                )

    def remove(self) -> None:
        """Take the algorithm off the model: from the next step on DDP averages gradients in full precision.

        Collective: call it on every rank between the same two steps.
        """
        self._hook.detach()

    def abort(self) -> None:
        """Stop background communication. Only algorithm "async" has any."""
        self._refuse_background("abort")

    def resume(self) -> None:
        """Start background communication again after `abort`. Only algorithm "async" has any."""
        self._refuse_background("resume")

    def _refuse_background(self, what: str) -> None:
        raise RuntimeError(
            f"{what}() is for algorithms that communicate in the background; {self.algorithm!r} does not"
        )

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"<bagua.Handle {self.algorithm}({options})>"

    def __reduce__(self) -> str:
        raise TypeError(_PICKLE_ADVICE)


def _check_ddp(ddp: DistributedDataParallel) -> None:
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"expected a model wrapped in torch.nn.parallel.DistributedDataParallel, got {type(ddp).__qualname__}"
        )
    if getattr(ddp, "_use_python_reducer", False):
        raise RuntimeError(
            "torch.compile's python_reducer skips C++ communication hooks without a word: set "
            "torch._dynamo.config.optimize_ddp to 'ddp_optimizer' (or True) before wrapping the model"
        )
    if ddp._comm_hooks:
        raise RuntimeError("this model already has a communication hook; DistributedDataParallel takes one")


def _device_of(ddp: DistributedDataParallel) -> torch.device:
    return next(parameter.device for parameter in ddp.parameters() if parameter.requires_grad)


def _refuse_uneven_division(ddp: DistributedDataParallel, args: Any) -> None:
    # torch divides by the ranks still at work only where no hook is registered; a hook divides by all of them.
    if ddp._join_config.enable and not ddp._divide_by_initial_world_size:
        raise RuntimeError(
            "join(divide_by_initial_world_size=False) is not supported with a bagua communication hook, which divides "
            "by the number of all ranks: use the default"
        )


def _parameters_text(ddp: DistributedDataParallel) -> str:
    """What has to be the same on every rank: shapes and dtypes in order."""
    return "; ".join(f"{p.dtype}{list(p.shape)}" for p in ddp.parameters() if p.requires_grad)


def register_comm_hook(
    ddp: DistributedDataParallel,
    name: str,
    optimizer: torch.optim.Optimizer | None = None,
    process_group: dist.ProcessGroup | None = None,
    **options: OptionValue,
) -> Handle:
    """Let an algorithm reduce the gradients of a DDP model. Collective: every rank calls it, before the first step.

    The model's process group may be of backend "bagua" or of a stock one ("gloo", "nccl").

    Args:
        ddp: the model, wrapped in DistributedDataParallel.
        name: one of `available_algorithms()`.
        optimizer: the model's optimizer, for algorithms that change weights or momentum.
        process_group: where to communicate; by default the model's own group.
        **options: the algorithm's options, see the table in the README.

    Raises:
        ValueError: an unknown name or option (the message lists the valid ones), or ranks that disagree.
        TypeError: an option of a wrong type, or a model that is not wrapped.
        RuntimeError: the model has a hook already, or would skip it.
    """
    complete = _C.check_options(name, options)
    _check_ddp(ddp)
    if optimizer is None and _C.algorithm_info(name)["needs_optimizer"]:
        raise ValueError(f"algorithm {name!r} acts on what the optimizer does: pass it as optimizer=")
    device = _device_of(ddp)
    hook = _C.Hook(name, complete, executors_for(process_group or ddp.process_group, device))
    hook.check_agreement(_parameters_text(ddp), str(device))
    _C.register_hook(ddp.reducer, hook)
    handle = Handle(hook)
    # What torch's own method does besides: for its logs, and so that a copy of the model is noticed.
    ddp._comm_hooks.append((_run_hook, handle))
    if ddp.logger is not None:
        ddp.logger._set_comm_hook_name(f"bagua_{name}")
    ddp.register_forward_pre_hook(_refuse_uneven_division)
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
        raise TypeError(_PICKLE_ADVICE)


def _first_tensor(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]


def _run_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    # then(): the future of a Python hook has to hold a Python object.
    return state.run(bucket).then(_first_tensor)


def comm_hook(
    name: str, process_group: dist.ProcessGroup | None = None, **options: OptionValue
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
    if _C.algorithm_info(name)["needs_optimizer"]:
        raise ValueError(f"algorithm {name!r} acts on what the optimizer does: use bagua.register_comm_hook")
    return HookState(name, complete, process_group), _run_hook
