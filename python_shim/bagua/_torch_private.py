# SPDX-License-Identifier: Apache-2.0
"""The private names of torch that this package uses, each once, so that a new version of torch is a look at this file.

A test sees to it that no other module of the package touches one. `torch_compat.h` is the same for C++.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["BackendOptions", "eager", "tree_leaves", "tree_map_only"]

# What torch hands to the creator of a backend, which has no public type.
BackendOptions = distributed_c10d._DistributedBackendOptions

# Keeps torch.compile out of a function that communicates. `torch.compiler.disable` would import torch._dynamo at once,
# which takes as long as torch's own import; this does when the function is first called.
eager = torch._disable_dynamo

# --- Many tensors at once, of which torch's public optimizers are made: there is no public form -----------------------

foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_addcdiv_ = torch._foreach_addcdiv_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_sqrt = torch._foreach_sqrt

# --- Process groups ---------------------------------------------------------------------------------------------------


def can_reconfigure() -> bool:
    """Whether torch can change the members of a group, as it can from 2.14 on."""
    return hasattr(dist, "_reconfigure")


def reconfigure_handle() -> str:
    """Return what others need to make this process a member of the default group."""
    return str(dist._get_reconfigure_handle())  # type: ignore[attr-defined]


def reconfigure(uuid: int, handles: Sequence[str]) -> None:
    """Have the default group consist of these, in the order of ranks. Collective."""
    dist._reconfigure(uuid, list(handles)).wait()  # type: ignore[attr-defined]


def barrier(group: dist.ProcessGroup, limit: timedelta) -> None:
    """Wait for all ranks of a group, as long as `limit` says: `dist.barrier` takes no timeout."""
    options = distributed_c10d.BarrierOptions()
    options.timeout = limit
    group.barrier(options).wait()


def default_group() -> dist.ProcessGroup:
    """Return the default group, or raise torch's own error; `dist.group.WORLD` is None before there is one."""
    return distributed_c10d._get_default_group()


def listed_groups() -> list[dist.ProcessGroup]:
    """Return all groups that `destroy_process_group()` would destroy, which torch lists nowhere else."""
    return list(distributed_c10d._world.pg_map)


def new_named_group(
    name: str, ranks: list[int], backend: str, timeout: timedelta, store: dist.Store | None, options: object
) -> dist.ProcessGroup:
    """Make and list a group that only `ranks` make, ascending, under a name that no other group of this process has.

    `new_group(use_local_synchronization=True)` needs no call of the other ranks either, but counts one group more on
    those that call: groups made later get other names on some ranks than on the rest, and never form (seen with torch
    2.15; 2.11 counts otherwise, to a similar effect). A name of ours counts nothing. Without
    `store` the ranks meet in that of the default group.
    """
    rank, given_name = ranks.index(dist.get_rank()), cast("Any", name)
    world = default_group()
    if store is None:
        _, store = distributed_c10d._world.pg_map[world]
    # Else torch splits a group that is bound to a device: all ranks would have to take part in that.
    device, world.bound_device_id = world.bound_device_id, None
    try:
        group, _ = distributed_c10d._new_process_group_helper(
            len(ranks), rank, ranks, backend, store, given_name, backend_options=options, timeout=timeout
        )
    finally:
        world.bound_device_id = device
    assert isinstance(group, dist.ProcessGroup)  # this rank is one of `ranks`
    distributed_c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def uncount_group(name: str) -> None:
    """Take a group that could not be made out of torch's count, by which it names the next one."""
    if name == str(distributed_c10d._world.group_count - 1):
        distributed_c10d._world.group_count -= 1


def is_outside(group: dist.ProcessGroup | None, operation: str) -> bool:
    """Return whether this rank is not in the group; with the warning of torch's own collectives."""
    if not distributed_c10d._rank_not_in_group(group):
        return False
    distributed_c10d._warn_not_in_group(operation)
    return True


def device_types(group: dist.ProcessGroup) -> list[torch.device]:
    """Return the devices whose tensors a group takes: `get_backend_config` knows no groups that are not listed."""
    return list(group._device_types)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return what communicates a group's tensors on a device, without TORCH_DISTRIBUTED_DEBUG=DETAIL's wrapper."""
    backend = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)


def timeout_of(backend: Any) -> timedelta:
    """Return the timeout of a backend's operations; torch's default where it does not show its options to Python."""
    options = getattr(backend, "options", None)
    return options._timeout if options is not None else dist.default_pg_timeout


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set the timeout in the options of a backend, for which there is no public name."""
    options._timeout = timeout


def group_over(backend: Any, store: dist.Store, rank: int, size: int, devices: Sequence[str]) -> dist.ProcessGroup:
    """Return a group that torch does not list, over a backend that is there already."""
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    for device in devices:
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
    return group


# --- DistributedDataParallel: what its own register_comm_hook() and forward() do --------------------------------------


def has_python_reducer(ddp: DistributedDataParallel) -> bool:
    """Return whether torch.compile's python_reducer is at work, which calls no C++ hook."""
    return bool(getattr(ddp, "_use_python_reducer", False))


def comm_hooks(ddp: DistributedDataParallel) -> list[Any]:
    """Return the list of a model's communication hooks, in which torch's own method notes them."""
    return cast("list[Any]", ddp._comm_hooks)


def name_comm_hook(ddp: DistributedDataParallel, name: str) -> None:
    """Tell DDP's logs of a hook, as torch's own method does."""
    if ddp.logger is not None:
        ddp.logger._set_comm_hook_name(name)


def is_joining(ddp: DistributedDataParallel) -> bool:
    return bool(ddp._join_config.enable)


def divides_by_ranks_at_work(ddp: DistributedDataParallel) -> bool:
    """Return whether `join()` was told to divide by the ranks still at work, which torch does without a hook only."""
    return not ddp._divide_by_initial_world_size


def has_delayed_parameters(ddp: DistributedDataParallel) -> bool:
    """Return whether DDP was given `delay_all_reduce_named_params`, which it reduces by itself, past every hook."""
    return bool(ddp._delay_all_reduce_params)


def has_rebuilt_buckets(ddp: DistributedDataParallel) -> bool:
    return bool(ddp._has_rebuilt_buckets)


def rebuild_buckets(ddp: DistributedDataParallel, build: Callable[[], bool] | None = None) -> bool:
    """Have DDP rebuild its buckets, by `build` or as its next forward does otherwise; returns whether it did."""
    if not (build or ddp.reducer._rebuild_buckets)():
        return False
    ddp._has_rebuilt_buckets = True
    return True


# --- FSDP2: the parameters that fully_shard() has sharded, and what it does with their gradients ----------------------


def fsdp_groups(module: Any) -> list[Any]:
    """Return the groups of parameters that `fully_shard` has made of a module; torch 2.11 and 2.12 make one or none."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def replica_group(group: Any) -> dist.ProcessGroup | None:
    """Return where a group's gradients are all-reduced; None where the mesh has one dimension."""
    return cast("dist.ProcessGroup | None", getattr(group.mesh_info, "replicate_process_group", None))


def set_replica_group(group: Any, replicas: dist.ProcessGroup) -> None:
    """Have a group's gradients all-reduced by something else."""
    group.mesh_info.replicate_process_group = replicas


def one_of_each_fsdp_state(modules: Sequence[Any]) -> list[Any]:
    """Return the first module of each state: `fully_shard([a, b])` gives both the same."""
    first: dict[int, Any] = {}
    for module in modules:
        first.setdefault(id(module._get_fsdp_state()), module)
    return list(first.values())


def is_fsdp_root(module: Any) -> bool:
    """Return whether FSDP2 ends backwards at this module; known from the first forward on."""
    return bool(module._get_fsdp_state()._is_root)


def has_all_reduce_hook(group: Any) -> bool:
    return group._all_reduce_hook is not None


def is_sharded(group: Any) -> bool:
    """Return whether a group's parameters are sharded, and not only replicated (`replicate`)."""
    return getattr(group.mesh_info, "shard_process_group", None) is not None


def shard_group(group: Any) -> dist.ProcessGroup:
    return cast("dist.ProcessGroup", group.mesh_info.shard_process_group)


_COMMS = {"all_gather": "_all_gather_comm", "reduce_scatter": "_reduce_scatter_comm"}


def comm_of_fsdp(group: Any, which: str) -> Any:
    """Return what communicates a group's "all_gather" or "reduce_scatter"."""
    return getattr(group, _COMMS[which])


def set_comm_of_fsdp(group: Any, which: str, comm: Any) -> None:
    """Have something else communicate it: what `set_custom_all_gather` does, for modules of several groups, too."""
    setattr(group, _COMMS[which], comm)


def reshards_after_forward(group: Any) -> bool:
    """Return whether a group's parameters are gathered once more in the backward."""
    return group.post_forward_mesh_info is not None


def reshards_to_another_mesh(group: Any) -> bool:
    """Return whether they are then gathered among fewer ranks."""
    return reshards_after_forward(group) and group.post_forward_mesh_info != group.mesh_info


def was_gathered(parameter: Any) -> bool:
    """Return whether FSDP2 has made the tensor that a parameter is while it is whole, which then stays."""
    return hasattr(parameter, "_unsharded_param")


def gathered_dtype(parameter: Any) -> torch.dtype:
    # Before the first forward only the policy knows it.
    dtype: torch.dtype | None = getattr(parameter, "param_dtype", parameter.mp_policy.param_dtype)
    own: torch.dtype = parameter.sharded_param.dtype
    return own if dtype is None or not own.is_floating_point else dtype


def shard_moment(parameter: Any) -> tuple[int, ...]:
    """Return what differs once a parameter was replaced, or changed in place by an operation on it, on all ranks alike.

    Not by operations on many tensors at once, such as those of optimizers. On a device, whose bits one would have to
    wait for, it differs on those ranks too whose shard alone was changed.
    """
    sharded = parameter.sharded_param
    own = sharded._local_tensor
    here = () if own.is_cpu else (own.data_ptr(), own._version)
    return id(sharded), sharded._version, *here


def shape_in_buffer(parameter: Any) -> torch.Size:
    """Return the shape of this rank's part of a gradient, as it lies in the flat tensor that travels."""
    return cast("torch.Size", parameter.padded_sharded_param_size)


def padded_shard(parameter: Any) -> Tensor:
    """Return this rank's shard of a parameter, with the rows that make all shards as long: the memory itself."""
    memory: Tensor = parameter._sharded_param_data
    return memory.detach().view(shape_in_buffer(parameter))


def is_view_of_buffer(parameter: Any, dtype: torch.dtype) -> bool:
    """Return whether `.grad` will be a view of the flat tensor of `dtype` that is reduced, and nobody reads it yet."""
    sharded = parameter.sharded_param
    kept = getattr(parameter, "sharded_grad_dtype", parameter.orig_dtype)
    hooks = getattr(sharded, "_post_accumulate_grad_hooks", None)
    return sharded.grad is None and not parameter.offload_to_cpu and not hooks and kept in (None, dtype)


def local_part(tensor: Tensor) -> Tensor:
    """Return the memory of this rank's part of a DTensor; another tensor as it is."""
    return cast("Tensor", getattr(tensor, "_local_tensor", tensor))


_reduced = threading.local()


@functools.cache
def watch_fsdp_reductions() -> None:
    """Have `parameters_being_reduced` know what FSDP2 reduces: it says so to nothing that communicates for it."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    reduce = _fsdp_param_group.foreach_reduce

    @functools.wraps(reduce)
    def reduce_and_tell(fsdp_params: list[Any], *args: Any, **kwargs: Any) -> Any:
        _reduced.parameters = fsdp_params
        try:
            return reduce(fsdp_params, *args, **kwargs)
        finally:
            _reduced.parameters = []

    _fsdp_param_group.foreach_reduce = reduce_and_tell


def after_fsdp_backward(module: Any, function: Callable[[], None]) -> Callable[[], None]:
    """Call a function whenever FSDP2 ends a backward that began at this module; returns what takes it off again.

    A backward inside another one, as of a reentrant checkpoint, is no backward of its own.
    """
    state = module._get_fsdp_state()
    finish = state._root_post_backward_final_callback

    @functools.wraps(finish)
    def finish_and_call() -> None:
        finish()
        function()

    state._root_post_backward_final_callback = finish_and_call
    return functools.partial(delattr, state, "_root_post_backward_final_callback")


def parameters_being_reduced() -> list[Any]:
    """Return FSDP2's parameters whose gradients this thread reduces at the moment, in the order of the flat tensor."""
    return list(getattr(_reduced, "parameters", []))


def is_compiled_autograd_on() -> bool:
    """Return whether backwards are compiled, in which FSDP2's communication is traced and not called."""
    from torch._dynamo import compiled_autograd, config

    return bool(config.compiled_autograd or getattr(compiled_autograd, "compiled_autograd_enabled", False))


# --- Optimizers and schedulers ----------------------------------------------------------------------------------------


def has_step_hooks(optimizer: Any) -> bool:
    """Return whether torch would call the hooks of this object, which a trainer's wrapper only looks like."""
    # They have to be its own, as wrappers pass on attributes of the optimizer within.
    own = getattr(optimizer, "__dict__", {}).get("_optimizer_step_post_hooks")
    inner = getattr(optimizer, "optimizer", None)
    return own is not None and own is not getattr(inner, "_optimizer_step_post_hooks", None)


def note_step(optimizer: Optimizer) -> None:
    """Note a step as the wrapper does that a scheduler puts around `step`; else it warns of a missing one."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def leave_unwrapped(step: Any) -> None:
    """Keep schedulers from wrapping a function that stands in the place of an optimizer's `step`."""
    step._wrapped_by_lr_sched = True


# --- Autograd ---------------------------------------------------------------------------------------------------------


def backward_id() -> int:
    """Return which backward this thread is in, from 1 on; 0 outside of one."""
    return torch._C._current_graph_task_id() + 1


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward at work, for which torch's public hooks have no moment."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor, or what shares its memory, was changed in place."""
    return tensor._version
