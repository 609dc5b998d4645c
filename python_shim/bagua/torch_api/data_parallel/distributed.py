# SPDX-License-Identifier: Apache-2.0
"""torch's DistributedDataParallel with an algorithm of bagua at work."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.utils import _to_kwargs
from torch.optim import Optimizer

from bagua.torch_api.algorithms._native import NativeAlgorithmImpl
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.communication import BaguaProcessGroup
from bagua.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel
from bagua.torch_api.data_parallel.functional import to_bagua_process_group
from bagua.torch_api.state_broadcast import broadcast_small_tensors

_MIB = 1 << 20
_DEFAULT_BUCKET_MIB = 25


class DistributedDataParallel_V1_9_0(nn.Module):
    """What `DistributedDataParallel` returns. `inner` is the algorithm at work, `module` the module itself."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        broadcast_buffers: bool = True,
        process_group: dist.ProcessGroup | BaguaProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = True,
        optimizers: Sequence[Optimizer] = (),
        algorithm: Algorithm | None = None,
        init_sync: bool = True,
    ) -> None:
        super().__init__()
        kinds = {parameter.device.type for parameter in module.parameters()}
        if len(kinds) > 1:
            raise ValueError(f"the module's parameters are to be on devices of one type, got {sorted(kinds)}")
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError(f"device_ids names the one device of this process, got {list(device_ids)}")
        self.module = module
        self.device = torch.device("cuda", device_ids[0]) if device_ids and isinstance(device_ids[0], int) else None
        if device_ids and isinstance(device_ids[0], torch.device):
            self.device = device_ids[0]
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        bucket_cap_mb = _DEFAULT_BUCKET_MIB if bucket_cap_mb is None else bucket_cap_mb
        self.inner = BaguaDistributedDataParallel(
            module,
            optimizers,
            algorithm or GradientAllReduceAlgorithm(),
            to_bagua_process_group(process_group),
            gradient_as_bucket_view=gradient_as_bucket_view,
            bucket_bytes=max(int(bucket_cap_mb * _MIB), 1),
            broadcasts_state=init_sync,
        )
        impl = self.inner.bagua_algorithm
        runs_in_background = isinstance(impl, NativeAlgorithmImpl) and impl.runs_in_background
        self.broadcast_buffers = broadcast_buffers and not runs_in_background
        if init_sync:
            self._broadcast_buffers()

    def _broadcast_buffers(self) -> None:
        buffers = [b for name, b in self.module.named_buffers() if name not in self.parameters_to_ignore]
        broadcast_small_tensors(buffers, self.inner.process_group.torch_group)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the coming forward and backward communicate."""
        return self.inner.require_backward_grad_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, is_required: bool) -> None:
        self.inner.require_backward_grad_sync = is_required

    @property
    def bagua_algorithm(self) -> AlgorithmImpl:
        """The algorithm at work."""
        return self.inner.bagua_algorithm

    @property
    def bagua_optimizers(self) -> list[Optimizer]:
        """The optimizers it knows of."""
        return self.inner.bagua_optimizers

    @property
    def bagua_buckets(self) -> list[BaguaBucket]:
        """The buckets in use, in their order."""
        return self.inner.bagua_buckets

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up locally."""
        with self.inner.no_sync():
            yield

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module, with tensors moved to its device where one was named."""
        if self.broadcast_buffers and self.training and torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._broadcast_buffers()
        if self.device is not None:
            moved_inputs, moved_kwargs = _to_kwargs(inputs, kwargs, self.device, False)
            inputs, kwargs = moved_inputs[0], moved_kwargs[0]
        return self.module(*inputs, **kwargs)

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Not there: give all ranks the same number of steps."""
        raise NotImplementedError("join() is not supported: give all ranks the same number of steps")

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Not there: the algorithm is the hook."""
        raise NotImplementedError("pass an algorithm instead of registering a communication hook")


def DistributedDataParallel(
    module: nn.Module,
    device_ids: Sequence[int | torch.device] | None = None,
    output_device: int | torch.device | None = None,
    dim: int = 0,
    broadcast_buffers: bool | None = None,
    process_group: dist.ProcessGroup | BaguaProcessGroup | None = None,
    bucket_cap_mb: float | None = None,
    find_unused_parameters: bool = False,
    check_reduction: bool = False,
    gradient_as_bucket_view: bool = True,
    optimizers: Sequence[Optimizer] = (),
    algorithm: Algorithm | None = None,
    *,
    init_sync: bool = True,
    device_mesh: DeviceMesh | None = None,
    **torch_options: Any,
) -> DistributedDataParallel_V1_9_0:
    """Wrap a module as torch's class of this name does, with an algorithm in place of its reduction of gradients.

    It takes all arguments of torch's class. Those that tune its reducer make no difference here.

    Args:
        module: the module; parameters, optimizer state and buffers become those of rank 0.
        device_ids: the one device that inputs are moved to; by default they stay.
        output_device: accepted as torch does; the output stays where the module leaves it.
        dim: accepted as torch does; a batch is not split.
        broadcast_buffers: whether rank 0's buffers are sent to all ranks before each forward, as is the default (not
            with algorithm AsyncModelAverage, whose ranks may take different numbers of steps).
        process_group: the ranks to work with, a group of torch's or of Bagua's; by default all.
        bucket_cap_mb: MiB of gradients that travel together; by default 25.
        find_unused_parameters: accepted: unused parameters always count with a gradient of zeros.
        check_reduction: accepted, as torch does.
        gradient_as_bucket_view: whether gradients lie in the memory of their bucket.
        optimizers: all optimizers of the module's parameters, for algorithms that need to know them.
        algorithm: the recipe; by default GradientAllReduceAlgorithm.
        init_sync: False: the ranks are the same already, nothing is sent at the start.
        device_mesh: of one dimension: instead of `process_group`.
        **torch_options: the other arguments of torch's class. `static_graph`, `skip_all_reduce_unused_params`,
            `delay_all_reduce_named_params` and its like say when or in which message a gradient travels, which the
            algorithm decides here: all gradients have arrived at the end of backward.

    Raises:
        TypeError: an argument that torch's class of the installed version does not know.
        ValueError: parameters on devices of several types, several `device_ids`, `device_mesh` of several dimensions or
            together with `process_group`.
        NotImplementedError: `mixed_precision`, which is torch's reducer itself: use torch.autocast.
    """
    _check_torch_options(torch_options)
    if device_mesh is not None:
        process_group = _group_of_mesh(device_mesh, process_group)
    return DistributedDataParallel_V1_9_0(
        module,
        device_ids,
        broadcast_buffers is None or broadcast_buffers,
        process_group,
        bucket_cap_mb,
        gradient_as_bucket_view,
        optimizers,
        algorithm,
        init_sync,
    )


def _check_torch_options(options: dict[str, Any]) -> None:
    known = set(inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters)
    unknown = sorted(set(options) - known)
    if unknown:
        raise TypeError(f"DistributedDataParallel() got an unexpected keyword argument {unknown[0]!r}")
    if options.get("mixed_precision") is not None:
        raise NotImplementedError("mixed_precision of DistributedDataParallel is not supported: use torch.autocast")


def _group_of_mesh(mesh: DeviceMesh, process_group: Any) -> dist.ProcessGroup:
    if process_group is not None or mesh.ndim != 1:
        raise ValueError(
            f"device_mesh is to have one dimension and to come without process_group, got {mesh.ndim} dimensions and "
            f"process_group={process_group!r}"
        )
    return mesh.get_group(0)
