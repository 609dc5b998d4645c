# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation over the batches of all ranks, for CPU tensors as well.

Definition: Bagua 0.9; what it computes is what `torch.nn.SyncBatchNorm` does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class SyncBatchNorm(nn.SyncBatchNorm):
    """`torch.nn.SyncBatchNorm`, which takes CPU tensors as well.

    On other devices it is torch's own. On the CPU it costs one collective of 2 C + 1 numbers in a forward in training
    mode and one of 2 C in its backward, for C channels.

    Args:
        num_features: C of an input of shape (N, C, ...).
        eps: added to the variance.
        momentum: how much of a batch goes into the running statistics; None for their plain mean.
        affine: whether there are a weight and a bias per channel.
        track_running_stats: whether there are running statistics, for evaluation.
        process_group: a torch process group, by default all ranks (an addition to the original's arguments, as the
            two of torch after it, `device` and `dtype`).

    Raises:
        ValueError: an input of fewer than 2 dimensions, or one value per channel on all ranks together.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`. In training mode all ranks have to call, as often and in the same order."""
        if input.device.type != "cpu":
            return super().forward(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        uses_batch = self.training or self.running_mean is None
        factor = self._average_factor()
        group = self._group_of_several() if self.training else None
        if group is None:
            keeps = not self.training or self.track_running_stats
            return F.batch_norm(
                input,
                self.running_mean if keeps else None,
                self.running_var if keeps else None,
                self.weight,
                self.bias,
                uses_batch,
                factor,
                self.eps,
            )
        output, mean, unbiased = _Normalise.apply(input, self.weight, self.bias, self.eps, group)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        result: Tensor = output
        return result

    def _average_factor(self) -> float:
        if not self.training or not self.track_running_stats or self.num_batches_tracked is None:
            return 0.0 if self.momentum is None else self.momentum
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    def _group_of_several(self) -> dist.ProcessGroup | None:
        """Return the group to compute with; None where this process is the only one."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = self.process_group if self.process_group is not None else dist.group.WORLD
        return group if dist.get_world_size(group) > 1 else None

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """See the function of this name."""
        return convert_sync_batchnorm(module, process_group)


def convert_sync_batchnorm(module: nn.Module, process_group: Any = None) -> nn.Module:
    """Return `module` with every BatchNorm layer inside replaced by a `SyncBatchNorm` with the same parameters.

    Args:
        module: changed in place, unless it is itself a BatchNorm layer.
        process_group: for the new layers, by default all ranks.

    >>> converted = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()))
    >>> [type(layer).__name__ for layer in converted]
    ['SyncBatchNorm', 'ReLU']
    """
    if isinstance(module, _BatchNorm):
        return _converted(module, process_group)
    for name, child in module.named_children():
        converted = convert_sync_batchnorm(child, process_group)
        if converted is not child:
            setattr(module, name, converted)
    return module


def _converted(layer: _BatchNorm, process_group: Any) -> SyncBatchNorm:
    made = SyncBatchNorm(
        layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, process_group
    )
    # The objects themselves: optimizers know the parameters.
    made.weight, made.bias = layer.weight, layer.bias
    made.running_mean, made.running_var = layer.running_mean, layer.running_var
    made.num_batches_tracked = layer.num_batches_tracked
    made.training = layer.training
    return made


class _Normalise(torch.autograd.Function):
    """Normalises by mean and variance over all ranks, with statistics in float32 at least.

    The same two collectives on every rank, even on one with an empty batch.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = _wide(input)
        mean, variance, count = _statistics(x, group)
        if count == 1:
            raise ValueError(
                f"SyncBatchNorm: more than 1 value per channel is expected when training, got 1 on all "
                f"{dist.get_world_size(group)} ranks together, shape {tuple(input.shape)} on this one"
            )
        inverse = torch.rsqrt(variance + eps)
        ctx.save_for_backward(input, weight, mean, inverse)
        ctx.count, ctx.group = count, group
        ctx.has_bias = bias is not None
        scale = inverse if weight is None else inverse * weight.to(x.dtype)
        output = (x - _spread(mean, x)) * _spread(scale, x)
        if bias is not None:
            output = output + _spread(bias.to(x.dtype), x)
        unbiased = variance * (count / (count - 1))
        ctx.mark_non_differentiable(mean, unbiased)
        return output.to(input.dtype), mean, unbiased

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, gradient: Tensor, *unused: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        input, weight, mean, inverse = ctx.saved_tensors
        x, dy = _wide(input), _wide(gradient)
        dims = _all_but_channels(x)
        normalised = (x - _spread(mean, x)) * _spread(inverse, x)
        sums = torch.stack([dy.sum(dims), (dy * normalised).sum(dims)])
        # Gradients of weight and bias are of this rank's batch alone, as those of any other layer.
        d_bias, d_weight = sums[0].clone(), sums[1].clone()
        dist.all_reduce(sums, group=ctx.group)
        sums /= ctx.count
        scale = inverse if weight is None else inverse * weight.to(x.dtype)
        d_input = (dy - _spread(sums[0], x) - normalised * _spread(sums[1], x)) * _spread(scale, x)
        return (
            d_input.to(input.dtype),
            None if weight is None else d_weight.to(weight.dtype),
            d_bias.to(d_bias.dtype if weight is None else weight.dtype) if ctx.has_bias else None,
            None,
            None,
        )


def _statistics(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, int]:
    """Return mean and biased variance per channel, and values per channel, over all ranks; the same bits on each."""
    dims = _all_but_channels(x)
    count = x.numel() // x.size(1)
    mean = x.sum(dims) / max(count, 1)
    deviation = (x - _spread(mean, x)).square().sum(dims)
    mine = torch.cat([mean, deviation, mean.new_tensor([count])])
    gathered = mine.new_empty(dist.get_world_size(group), mine.numel())
    dist.all_gather_into_tensor(gathered.view(-1), mine, group=group)
    # Deviations from the means of the ranks, not sums of squares, whose difference would cancel.
    means, deviations, counts = torch.split(gathered, [x.size(1), x.size(1), 1], dim=1)
    total = counts.sum()
    common = (means * counts).sum(0) / total
    squares = deviations.sum(0) + ((means - common).square() * counts).sum(0)
    return common, squares / total, int(total)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _spread(per_channel: Tensor, like: Tensor) -> Tensor:
    return per_channel.view([-1 if dim == 1 else 1 for dim in range(like.dim())])
