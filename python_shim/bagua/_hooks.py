# SPDX-License-Identifier: Apache-2.0
"""Algorithms as communication hooks of stock DistributedDataParallel."""
# No `from __future__ import annotations` here: torch compares the annotations of a hook with the types themselves.

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bagua import _managed as managed
from bagua._argument_checks import check_algorithm, check_group_type, check_optimizer_type
from bagua._attachment import (
    PICKLE_ADVICE,
    Attachment,
    check_model,
    check_numbers,
    check_optimizer,
    check_weights,
    facts_of,
    is_linear,
    names_and_roles,
    refuse_uneven_division,
    say_if_nothing_is_coded,
    say_what_is_sent,
    scaler_of,
    synchronised_buffers,
    trainable_parameters,
    trained_by_name,
    unwrapped,
)
from bagua._buckets import BucketSplitter
from bagua._executors import executors_for, refuse, start
from bagua._handle import Handle, OptionArgument, OptionValue, check_scaler
from bagua._layers import layers_of
from bagua._message_bytes import parameters_of
from bagua._native import _C
from bagua._registry import describe
from bagua._stats import Stats
from bagua._torch_private import comm_hooks, has_python_reducer, has_rebuilt_buckets, listed_groups, name_comm_hook

# What callers may mean by an option that no algorithm has.
_OTHER_NAMES = ("optimizer", "process_group")
_REGISTER = "register_comm_hook(model, "
_MODEL_FIRST = "; the model comes first: write register_comm_hook(model, 'bytegrad')"


def _ddp_in(model: Any) -> DistributedDataParallel:
    """Return the DDP model, also where torch.compile or a library such as Fabric has put a module around it.

    Such a wrapper holds one DDP model and no trainable parameters beside it.
    """
    if isinstance(model, DistributedDataParallel):
        return model
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    found = {name: module for name, module in modules if isinstance(module, DistributedDataParallel)}
    if not found:
        raise TypeError(
            "expected a model wrapped in torch.nn.parallel.DistributedDataParallel, got "
            f"{type(model).__qualname__}: write bagua.register_comm_hook(DistributedDataParallel(model), ...). With "
            "several processes, accelerate and Fabric wrap the model: pass what prepare() or setup() has returned"
        )
    [(name, ddp), *others] = found.items()
    reduced = set(ddp.parameters())
    outside = [path for path, p in model.named_parameters() if p.requires_grad and p not in reduced]
    if others or outside:
        besides = ", ".join(found) if others else f"{name} and the parameters {', '.join(outside[:3])} outside of it"
        raise TypeError(
            f"expected one DistributedDataParallel model, got {type(model).__qualname__}, which holds {besides}: pass "
            f"the DDP model itself, such as model.{name}, and register each one by itself"
        )
    return ddp


def _refuse_without_ddp(model: Any, process_group: Any) -> None:
    """Tell them too where there is no DDP model, if it is certain in which group and for which device they wait."""
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    group: dist.ProcessGroup | None = None
    if isinstance(process_group, dist.ProcessGroup):
        group = process_group
    elif process_group is None and len(listed_groups()) == 1:
        group = dist.group.WORLD
    if parameters and group is not None:
        with contextlib.suppress(Exception):
            refuse(executors_for(group, parameters[0].device), parameters[0].device)


def _check_ddp(ddp: DistributedDataParallel) -> None:
    if has_python_reducer(ddp):
        raise RuntimeError(
            "torch.compile's python_reducer skips C++ communication hooks without a word: set "
            "torch._dynamo.config.optimize_ddp to 'ddp_optimizer' (or True) before wrapping the model"
        )
    former = removed_handle(ddp)
    if comm_hooks(ddp) and former is None:
        raise RuntimeError(
            "this model already has a communication hook; DistributedDataParallel takes one. Where it is one of "
            "bagua's, call handle.remove() first"
        )
    if former is not None and former.place is None:
        raise RuntimeError(
            "this model has had an algorithm under a Manager, in whose place no other can come: wrap the module in "
            "DistributedDataParallel anew"
        )


def _check_reduced(ddp: DistributedDataParallel, trained: int) -> None:
    """Refuse a model of which other parameters can be trained than when it was wrapped, which DDP does not notice."""
    reduced = trained if ddp.logger is None else _C.count_reduced(ddp.logger)
    if reduced != trained:
        raise ValueError(
            f"DDP reduces {reduced} parameters, and {trained} are trainable: set requires_grad before the model is "
            "wrapped in DistributedDataParallel"
        )


def removed_handle(ddp: DistributedDataParallel) -> Handle | None:
    """Return the handle of an algorithm that was taken off, in whose place another one may come."""
    states = [state for _, state in comm_hooks(ddp)]
    return states[0] if len(states) == 1 and isinstance(states[0], Handle) and states[0].is_removed else None


def _make_hook(
    ddp: DistributedDataParallel,
    algorithm: str,
    options: dict[str, OptionArgument],
    optimizer: Any,
    process_group: Any,
    executors: Any,
) -> _C.Hook:
    """Check everything that this rank can see by itself."""
    check_algorithm(algorithm, _MODEL_FIRST)
    complete = _C.check_options(algorithm, options, _OTHER_NAMES)
    check_optimizer_type(algorithm, optimizer)
    check_group_type(algorithm, process_group, _REGISTER)
    _check_ddp(ddp)
    trained = trained_by_name(ddp)
    parameters = list(trained.values())
    if not parameters:
        raise ValueError(
            f"algorithm {algorithm!r} has nothing to do: all parameters of the model are frozen. Set "
            "requires_grad=True on those to be trained, before the model is wrapped in DistributedDataParallel"
        )
    _check_reduced(ddp, len(parameters))
    check_numbers(trained, algorithm)
    _C.check_names(algorithm, complete, [name for name, _ in ddp.module.named_parameters()])
    check_optimizer(trained, optimizer, algorithm)
    if describe(algorithm)["optimizer"]:
        check_model(ddp, algorithm, is_hierarchical=bool(complete.get("hierarchical")))
    # The first step of a static graph is unlike the others; it is over where buckets have been rebuilt.
    is_first_static = ddp.static_graph and not has_rebuilt_buckets(ddp)
    hook = _C.Hook(algorithm, complete, executors, parameters, is_first_static)
    hook.use_parameters(names_and_roles(ddp.module, parameters))
    hook.use_model(layers_of(trained), synchronised_buffers(ddp))
    if optimizer is not None:
        hook.use_optimizer(is_linear([optimizer]))
    if hook.keeps_residuals:
        check_weights(trained, algorithm)
    if ddp.find_unused_parameters or ddp.static_graph:
        hook.watch_use()
    return hook


def register_comm_hook(
    ddp: DistributedDataParallel,
    algorithm: str,
    optimizer: Optimizer | None = None,
    process_group: dist.ProcessGroup | None = None,
    manager: managed.Manager | None = None,
    **options: OptionArgument,
) -> Handle:
    """Let an algorithm communicate for a DDP model. Collective: every rank calls it, before the first step.

    The model's process group may be of backend "bagua" or of a stock one ("gloo", "nccl"). Where the algorithm would
    compress nothing between the ranks that there are, rank 0 logs one line (logger "bagua") with what to change; else
    one, of level INFO, with what becomes of the bytes.

    Args:
        ddp: the model, wrapped in DistributedDataParallel; or what torch.compile, accelerate's `prepare()` or Fabric's
            `setup()` has made of it.
        algorithm: one of `available_algorithms()`.
        optimizer: the model's optimizer, for algorithms that change weights or momentum: "decentralized",
            "low_precision_decentralized", "async", "local_sgd", "diloco" (any optimizer) and "qadam"
            (`bagua.QAdamOptimizer`). One that accelerate, Fabric or Lightning has wrapped will do. Others need none;
            "quantized_allreduce" chooses by it whether 2 bits have error feedback, and the loss scale of accelerate's
            optimizer is followed (see `Handle.follow`).
        process_group: where to communicate; by default the model's own group.
        manager: torchft's Manager over that group, which decides who takes part in a step. Errors are reported to it
            and not raised. For algorithms without an optimizer.
        **options: the algorithm's options, see each algorithm's page.

    Raises:
        ValueError: an unknown name or option (the message lists the valid ones), a value out of range, a pattern that
            fits no parameter's name, an optimizer that is missing or not the model's, a model whose parameters are all
            frozen, or others than when it was wrapped, or ranks that disagree. What one rank refuses ends the call on
            all.
        TypeError: an option, optimizer or group of a wrong type, or a model that is not wrapped.
        RuntimeError: the model has a hook already, that is at work, or would skip it.
    """
    scaler = scaler_of(optimizer)
    optimizer = unwrapped(optimizer)
    try:
        ddp = _ddp_in(ddp)
    except TypeError:
        _refuse_without_ddp(algorithm if isinstance(algorithm, nn.Module) else ddp, process_group)
        check_algorithm(algorithm, _MODEL_FIRST)
        _C.check_options(algorithm, options, _OTHER_NAMES)
        raise
    given: Any = process_group
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        # The others do not wait for this rank.
        check_algorithm(algorithm, _MODEL_FIRST)
        check_group_type(algorithm, given, _REGISTER)
    parameters = trainable_parameters(ddp)
    device = next(iter(parameters or ddp.parameters())).device
    group = process_group if isinstance(process_group, dist.ProcessGroup) else ddp.process_group
    main = executors_for(group, device)
    try:
        hook = _make_hook(ddp, algorithm, options, optimizer, process_group, main)
        if scaler is not None and hook.keeps_residuals:
            check_scaler(scaler)
        if manager is not None:
            managed.prepare(ddp, algorithm, group)
    except Exception:
        refuse(main, device)
        raise
    text = "; ".join(f"{p.dtype}{list(p.shape)}" for p in parameters)
    start(hook, group, device, text, facts_of(optimizer))
    former = removed_handle(ddp)
    if manager is not None:
        place = None
        ddp.register_comm_hook(managed.ManagedHook(hook, group, manager), managed.ManagedHook.run)
    elif former is None:
        place = _C.register_hook(ddp.reducer, hook)
    else:
        assert former.place is not None  # of a DDP model
        place = former.place
        place.take_over(hook)
    if hook.wants_small_buckets:
        BucketSplitter(ddp, parameters)
    attachment = None
    if describe(algorithm)["optimizer"]:
        assert optimizer is not None
        attachment = Attachment(hook, ddp, optimizer, group)
    else:
        ddp.register_forward_pre_hook(refuse_uneven_division)
    handle = Handle(hook, attachment, place, group)
    if scaler is not None and handle.keeps_residuals:
        handle.follow(scaler)
    # What torch's own method does besides: for its logs, and so that a copy of the model is noticed.
    comm_hooks(ddp)[:] = [(_run_hook, handle)]
    name_comm_hook(ddp, f"bagua_{algorithm}")
    if manager is None:  # with one the group is alone yet
        say_what_is_sent(hook, group, parameters_of(parameters, names_and_roles(ddp.module, parameters)), optimizer)
    return handle


# With comm_hook parameters are numbered as their gradients come, not in the model's order.
_BY_ARRIVAL = "arrival"
_WITH_RESIDUALS = ("quantized_allreduce", "powersgd")


class HookState:
    """The state of the two-argument form: an algorithm that finds its process group at the first bucket.

    It has its handle from then on; what is loaded or followed before is so at that bucket.
    """

    def __init__(
        self, algorithm: str, options: dict[str, OptionValue], process_group: dist.ProcessGroup | None
    ) -> None:
        self._algorithm = algorithm
        self._options = options
        self._process_group = process_group
        self._handle: Handle | None = None
        self._loaded: dict[str, Any] | None = None
        self._followed: list[torch.amp.GradScaler] = []

    def run(self, bucket: dist.GradBucket) -> torch.futures.Future[list[torch.Tensor]]:
        if self._handle is None:
            group = self._process_group or dist.group.WORLD
            if group is None:
                raise RuntimeError("a bagua communication hook needs an initialised process group")
            executors = executors_for(group, bucket.buffer().device)
            hook = _C.Hook(self._algorithm, self._options, executors)
            self._handle = Handle(hook, None, None, group)
            say_if_nothing_is_coded(hook, group)
        check_numbers({f"of shape {[*p.shape]}": p for p in bucket.parameters() if p.is_complex()}, self._algorithm)
        if self._loaded is not None:
            self._handle.load_state_dict(self._loaded)
            self._loaded = None
        while self._followed:
            self._handle.follow(self._followed.pop())
        return self._handle._hook.run(bucket)

    def stats(self) -> Stats | dict[str, Any]:
        """As `Handle.stats()`; empty before the first bucket."""
        return {} if self._handle is None else self._handle.stats()

    def state_dict(self) -> dict[str, Any]:
        """As `Handle.state_dict()`, which every rank saves; before the first bucket what was loaded, or nothing."""
        if self._loaded is not None or self._handle is None:
            return {**(self._loaded or {}), "order": _BY_ARRIVAL}
        return {**self._handle.state_dict(), "order": _BY_ARRIVAL}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As `Handle.load_state_dict()`; before the first bucket, which then raises what that raises."""
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"the checkpoint must be a dict, got {type(state_dict).__qualname__}")
        if state_dict.get("order") != _BY_ARRIVAL:
            raise ValueError(
                "the checkpoint is not of what comm_hook returned: a handle's goes to register_comm_hook's"
            )
        given = {name: value for name, value in state_dict.items() if name != "order"}
        if self._handle is not None:
            self._handle.load_state_dict(given)
        elif given:
            self._loaded = given

    def follow(self, scaler: torch.amp.GradScaler) -> None:
        """As `Handle.follow()`, with "quantized_allreduce" and "powersgd"."""
        check_scaler(scaler)
        if self._algorithm not in _WITH_RESIDUALS:
            raise RuntimeError(f"algorithm {self._algorithm!r} remembers no gradients, and needs no follow()")
        if self._handle is None:
            self._followed.append(scaler)
        else:
            self._handle.follow(scaler)

    def __reduce__(self) -> str:
        raise TypeError(PICKLE_ADVICE)


def _run_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    # then(): the future of a Python hook has to hold a Python object.
    return state.run(bucket).then(lambda future: future.value()[0])


def comm_hook(
    algorithm: str, process_group: dist.ProcessGroup | None = None, **options: OptionArgument
) -> tuple[HookState, Any]:
    """Return `(state, hook)` for `ddp.register_comm_hook(state, hook)` and Lightning's `ddp_comm_state/ddp_comm_hook`.

    Prefer `register_comm_hook`: it checks that the ranks agree, and its hook needs no Python on the way of a gradient.
    This one is given no model: it knows shapes, but neither names of parameters nor which are embeddings or the head.
    Options that need them are refused, but for a default. The state has `stats()`, `state_dict()`, `load_state_dict()`
    and `follow(scaler)` of a `Handle`: without them a run that continues lacks its residuals.

    Args:
        algorithm: one of `available_algorithms()`; one that needs the optimizer has to go through `register_comm_hook`.
        process_group: where to communicate; by default the default group at the time of the first step.
        **options: the algorithm's options.

    Raises:
        ValueError, TypeError: as `register_comm_hook`.
    """
    check_algorithm(algorithm, ". comm_hook takes no model: its result goes to ddp.register_comm_hook(*result)")
    if describe(algorithm)["optimizer"]:
        raise ValueError(
            f"algorithm {algorithm!r} acts on what the optimizer does: use bagua.register_comm_hook(model, "
            f"{algorithm!r}, optimizer=optimizer)"
        )
    if "optimizer" in options or isinstance(process_group, Optimizer):
        raise TypeError(f"comm_hook takes no optimizer, and algorithm {algorithm!r} needs none: leave it out")
    complete = _C.check_options(algorithm, options, ["process_group"])
    check_group_type(algorithm, process_group, "comm_hook(")
    _C.check_names(algorithm, complete, None)
    return HookState(algorithm, complete, process_group), _run_hook
