# SPDX-License-Identifier: Apache-2.0
"""States and other objects that ranks exchange, whose tensors are taken out of their containers and put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Size, Tensor

from bagua._torch_private import tree_leaves, tree_map_only

_Object = TypeVar("_Object")


def gathered(own: _Object, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> list[_Object]:
    """Return what each rank of the group gives. Collective.

    Where the group takes no CPU tensors it travels on `device`. By itself torch takes the current one, the first on
    every rank of a script that has only moved its model, which is all that DDP asks for.
    """
    everyones = [own] * dist.get_world_size(group)
    with torch.accelerator.device_index(None if device is None else device.index):
        dist.all_gather_object(everyones, own, group=group)
    return everyones


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of what a model has returned, which torch's `_pytree` need not know."""
    rest, seen = [output], set()
    while rest:
        for leaf in tree_leaves(rest.pop()):
            if isinstance(leaf, Tensor):
                yield leaf
            elif id(leaf) not in seen:  # an object may hold itself
                seen.add(id(leaf))
                if isinstance(leaf, Mapping):
                    rest.append([*leaf.values()])
                elif isinstance(leaf, Set | list | tuple):
                    rest.append([*leaf])
                elif is_dataclass(leaf) and not isinstance(leaf, type):
                    rest.append([getattr(leaf, field.name, None) for field in fields(leaf)])


def to_cpu(tree: Any) -> Any:
    """Return the same containers with their tensors on the CPU."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), tree)


class _Place(int):
    """Where a tensor was taken out."""


def without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Return a state with a place in the stead of each tensor; these are added to `tensors`.

    Those inside an object that torch's `_pytree` does not know stay there, to be pickled.
    """

    def take(tensor: Tensor) -> _Place:
        tensors.append(tensor)
        return _Place(len(tensors) - 1)

    return tree_map_only(Tensor, take, value, is_leaf=lambda one: isinstance(one, Size))  # else a plain tuple


def with_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Return what `without_tensors` was given, with these tensors in the places."""
    return tree_map_only(_Place, tensors.__getitem__, value, is_leaf=lambda one: isinstance(one, Size))


def broadcast_state(state: Any, source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the state that rank `source` of the group has given; those of others are not read. Collective.

    Its tensors travel on `device`, whose tensors the group takes. On the other ranks they are contiguous, and on the
    CPU where they are on rank `source`, else on `device`.
    """
    tensors: list[Tensor] = []
    message: list[Any] = [None]
    if group.rank() == source:
        skeleton = without_tensors(state, tensors)
        message = [(skeleton, [(tensor.shape, tensor.dtype, tensor.is_cpu) for tensor in tensors])]
    with torch.accelerator.device_index(device.index):  # see `gathered`
        dist.broadcast_object_list(message, group=group, group_src=source)
    skeleton, kinds = message[0]
    if group.rank() != source:
        tensors = [
            torch.empty(shape, dtype=dtype, device="cpu" if is_cpu else device) for shape, dtype, is_cpu in kinds
        ]
    for tensor in tensors:
        broadcast_tensor(tensor, source, group, device)
    return with_tensors(skeleton, tensors)


@torch.no_grad()
def broadcast_tensor(tensor: Tensor, source: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Overwrite a tensor by that of rank `source` of the group. Collective."""
    # Not every backend takes what is not contiguous, such as weights in channels_last.
    travelling = tensor.detach().to(device).contiguous()
    dist.broadcast(travelling, group=group, group_src=source)
    if travelling.data_ptr() != tensor.data_ptr() and group.rank() != source:
        tensor.copy_(travelling)
