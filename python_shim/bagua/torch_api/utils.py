# SPDX-License-Identifier: Apache-2.0
"""Lists of tensors as one flat tensor. Definition: `bagua.torch_api.utils` of Bagua 0.9.

Its `average_by_removing_extreme_values` and `StatisticalAverage` belonged to the autotune service, and went with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from bagua.torch_api._coalescing import flattened


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return a one-dimensional copy of all elements, tensor after tensor.

    Args:
        tensors: at least one, all of one dtype.

    >>> flatten([torch.ones(2), torch.zeros(1, 2)])
    tensor([1., 1., 0., 0.])
    """
    flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return views of `flat` in the shapes of `tensors`: what `flatten(tensors)` was made of.

    >>> unflatten(torch.arange(4), [torch.ones(2), torch.zeros(1, 2)])
    (tensor([0, 1]), tensor([[2, 3]]))
    """
    views: tuple[Tensor, ...] = _unflatten_dense_tensors(flat, tensors)  # type: ignore[no-untyped-call]
    return views


def get_flattened_tensor(tensors: Sequence[Tensor]) -> Tensor | None:
    """As `flatten`; None for no tensors."""
    return flatten(tensors) if tensors else None


def apply_flattened_call(bucket: Sequence[Tensor], call: Callable[..., Any], extra_args: Any = None) -> None:
    """Call a function with a flat copy of some tensors, which it changes in place, and copy the result back.

    `torch.distributed.all_reduce` gives the mean, as in the original.

    Args:
        bucket: tensors of one dtype.
        call: takes the flat tensor and `extra_args`.
        extra_args: its other arguments.

    >>> tensors = [torch.ones(2), torch.zeros(1, 2)]
    >>> apply_flattened_call(tensors, lambda flat: flat.add_(1))
    >>> tensors
    [tensor([2., 2.]), tensor([[1., 1.]])]
    """
    flat = flatten(bucket)
    call(flat, *(extra_args or ()))
    if call is torch.distributed.all_reduce:
        flat /= torch.distributed.get_world_size()
    for tensor, result in zip(bucket, unflatten(flat, bucket), strict=True):
        tensor.copy_(result)


def apply_flattened_call_all(tensors: Sequence[Tensor], call: Callable[..., Any]) -> None:
    """As `apply_flattened_call`, for each dtype and device by itself."""
    for alike in flattened(tensors):
        apply_flattened_call(alike.tensors, call)


def check_contiguous(tensors: Sequence[Tensor]) -> bool:
    """Return whether the tensors lie one after another in memory.

    >>> check_contiguous(torch.arange(6).split(2))
    True
    """
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
    return all(tensor.data_ptr() == end for tensor, end in zip(tensors[1:], ends, strict=False))
