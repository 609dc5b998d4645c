# SPDX-License-Identifier: Apache-2.0
"""A model that `fully_shard` has sharded, as an algorithm is told of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bagua._attachment import names_and_roles
from bagua._torch_private import (
    comm_of_fsdp,
    fsdp_groups,
    is_compiled_autograd_on,
    is_sharded,
    one_of_each_fsdp_state,
    replica_group,
    set_comm_of_fsdp,
    shape_in_buffer,
    shard_group,
)


def _modules_of_fsdp(model: nn.Module) -> list[nn.Module]:
    """Return the modules that `fully_shard` was called on; refuses what shards in another way."""
    # To import it takes seconds.
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model that fully_shard has sharded, got {type(model).__qualname__}")
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError("FullyShardedDataParallel (FSDP1) has no hook for this: shard the model by fully_shard")
        if isinstance(module, DistributedDataParallel):
            raise ValueError("DistributedDataParallel shards nothing: use bagua.register_comm_hook(model, ...)")
    found: list[nn.Module] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not found and any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(
            "the model's parameters are DTensors, but fully_shard has sharded none of them: wrappers of another kind "
            "(SimpleFSDP, trainers of graphs) communicate where no hook is called. Shard the model by fully_shard"
        )
    if not found:
        raise ValueError(f"fully_shard has sharded no module of this {type(model).__qualname__}: call it before")
    _check_autograd()
    return found


def _check_autograd() -> None:
    if is_compiled_autograd_on():
        raise ValueError("compiled_autograd traces what FSDP2 communicates, and calls no hook: switch it off for good")


class ShardedModel:
    """The parameters of a model that `fully_shard` has sharded; they are resharded, if they were left whole.

    Raises:
        ValueError: it cannot be done right; the message names the setting.
        RuntimeError: an algorithm is at work on it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.whole = model
        # What communicates in the place of FSDP2: for which group, and what of it.
        self._placed: list[tuple[Any, str, Any]] = []
        self.modules = one_of_each_fsdp_state(_modules_of_fsdp(model))
        self.groups = [group for module in self.modules for group in fsdp_groups(module)]
        if not all(is_sharded(group) for group in self.groups):
            raise ValueError(
                "a part of the model was given to replicate(), which does not shard it: use DistributedDataParallel "
                "and register_comm_hook"
            )
        for module in self.modules:
            module.reshard()
        by_tensor = {p.sharded_param: p for group in self.groups for p in group.fsdp_params}
        self.all_names = [name for name, _ in model.named_parameters()]
        # FSDP2's parameters, frozen ones too: they may be trained later.
        self.parameters = [by_tensor[tensor] for tensor in model.parameters() if tensor in by_tensor]
        tensors: list[Tensor] = [parameter.sharded_param for parameter in self.parameters]
        if not any(tensor.requires_grad for tensor in tensors):
            raise ValueError("all parameters that fully_shard has sharded are frozen: there are no gradients to reduce")
        if any(tensor.is_meta for tensor in tensors):
            raise ValueError("parameters are on the meta device: call model.to_empty() and initialise them before")
        self.names_and_roles = names_and_roles(model, tensors)
        self.device: torch.device = self.groups[0].device
        # Whether the mesh has a second dimension, of ranks that hold the same shards.
        self.is_hybrid = any(replica_group(group) is not None for group in self.groups)
        self.group = self._ranks()

    def _ranks(self) -> dist.ProcessGroup:
        """Return the ranks among which gradients are exchanged."""
        replicas = {replica_group(group) for group in self.groups}
        shards = {shard_group(group) for group in self.groups}
        # What stands there for another algorithm remembers what it has replaced.
        if any(hasattr(comm, "stock") for comm in (*replicas, *self._comms("reduce_scatter"))):
            raise RuntimeError("compress() is at work on this model already: call handle.remove() first")
        if len(replicas) > 1 or (self.is_hybrid and None in replicas) or (not self.is_hybrid and len(shards) > 1):
            raise ValueError("parts of the model are sharded on different meshes: give all of them the same mesh")
        [group] = replicas if self.is_hybrid else shards
        assert group is not None
        return group

    @property
    def shards(self) -> dist.ProcessGroup:
        """The ranks that hold the other shards."""
        return shard_group(self.groups[0])

    def _comms(self, which: str) -> list[Any]:
        return [comm_of_fsdp(group, which) for group in self.groups]

    def check_comms(self, which: str) -> None:
        """Refuse what does not communicate as FSDP2 does by default, but for its memory."""
        for comm in self._comms(which):
            if type(comm).__name__ not in ("DefaultAllGather", "DefaultReduceScatter"):
                raise ValueError(
                    f"a module's {which} is {type(comm).__name__}: set_custom_{which}(), set_symm_mem_for_comm() and "
                    "set_allocate_memory_from_process_group_for_comm() do not go together with compress()"
                )

    def put_comm(self, group: Any, which: str, comm: Any) -> Callable[[], None]:
        """Have something else communicate for a group; returns what takes it off again, unless it was replaced."""
        former = comm_of_fsdp(group, which)
        set_comm_of_fsdp(group, which, comm)
        self._placed.append((group, which, comm))

        def take_off() -> None:
            if comm_of_fsdp(group, which) is comm:
                set_comm_of_fsdp(group, which, former)

        return take_off

    def check_placed(self) -> None:
        """Refuse what the user has put in the place of ours since."""
        _check_autograd()
        for group, which, comm in self._placed:
            found = comm_of_fsdp(group, which)
            if found is not comm:
                raise ValueError(
                    f"bagua.fsdp: {type(found).__name__} has taken the place of what compress() has put there, as by "
                    f"set_custom_{which}(): call handle.remove() before"
                )

    @property
    def parts(self) -> int:
        """How many parts of a gradient travel in one flat tensor: one for each rank that the others are sharded to."""
        return 1 if self.is_hybrid else self.group.size()

    @property
    def trained(self) -> dict[str, Tensor]:
        """The parameters that are not frozen, by name."""
        named = zip((name for name, _ in self.names_and_roles), self.parameters, strict=True)
        return {name: p.sharded_param for name, p in named if p.sharded_param.requires_grad}

    def leave_frozen_out(self) -> None:
        """Forget the parameters that are frozen now, which nobody exchanges."""
        are_trained = [parameter.sharded_param.requires_grad for parameter in self.parameters]
        self.parameters = list(compress(self.parameters, are_trained))
        self.names_and_roles = list(compress(self.names_and_roles, are_trained))

    def shapes(self) -> list[Tensor]:
        """Return tensors of a single element in the shapes that gradients have when they travel, part by part."""
        return [
            torch.empty(1, dtype=p.sharded_param.dtype, device=self.device).expand(shape_in_buffer(p))
            for _ in range(self.parts)
            for p in self.parameters
        ]

    def description(self) -> str:
        """Return what has to be the same on all ranks that exchange gradients."""
        return "; ".join(f"{p.sharded_param.dtype}{list(shape_in_buffer(p))}" for p in self.parameters)
