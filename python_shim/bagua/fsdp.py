# SPDX-License-Identifier: Apache-2.0
"""Models that `fully_shard` has sharded, with their gradients coded where the network is slow::

    mesh = init_device_mesh("cpu", (hosts, ranks_per_host), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    handle = bagua.fsdp.compress(model, gradients="int8")

Inside a host the model is sharded, in full precision; between hosts the gradients of the shards are averaged, coded. On
a mesh of one dimension gradients are reduce-scattered, coded, and weights="cache" gathers weights once a step.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch.distributed as dist
from torch import nn

from bagua._argument_checks import check_algorithm
from bagua._attachment import say_if_nothing_is_coded
from bagua._executors import executors_for, start
from bagua._native import _C
from bagua._registry import available_algorithms, available_codecs, describe
from bagua._sharded import ShardedModel, ShardReduction
from bagua._torch_private import default_group, gathered_dtype, reshards_to_another_mesh, shape_in_buffer
from bagua._weight_cache import CachedGather
from bagua.handle import Handle, OptionArgument
from bagua.stats import Stats

__all__ = ["compress"]

_BY_DEFAULT = "quantized_allreduce"
_logger = logging.getLogger("bagua")


class _ShardedHandle(Handle):
    """The handle of an algorithm at work on a sharded model; state and figures are those of this rank's shards."""

    def __init__(self, hook: _C.Hook, reduction: ShardReduction, caches: list[CachedGather]) -> None:
        # A checkpoint is this rank's alone, whatever dimension of the mesh it differs in.
        super().__init__(hook, None, None, default_group())
        self._reduction = reduction
        self._caches = caches

    def stats(self) -> Stats:
        """See `Handle.stats`; `memory` has what weights="cache" keeps."""
        stats = super().stats()
        if self._caches:
            stats["memory"]["gathered weights"] = sum(cache.bytes for cache in self._caches)
        return stats

    def remove(self) -> None:
        """See `Handle.remove`; `compress` then takes the model again."""
        if not self.is_removed:
            super().remove()
            self._reduction.detach()
            for cache in self._caches:
                cache.detach()


def _caches(sharded: ShardedModel, weights: str | None) -> list[CachedGather]:
    """Return what gathers weights."""
    if weights is None:
        return []
    if weights != "cache" and weights not in available_codecs():
        raise ValueError(f"weights={weights!r}: expected None, 'cache' or a codec ({', '.join(available_codecs())})")
    if sharded.is_hybrid:
        raise ValueError(
            f"weights={weights!r} is for a mesh of one dimension between hosts; on this mesh weights are gathered "
            "along its second dimension, inside a host"
        )
    sharded.check_comms("all_gather")
    if any(reshards_to_another_mesh(group) for group in sharded.groups):
        raise ValueError(
            f"weights={weights!r} and reshard_after_forward=<number of ranks> are two ways to the same: leave one out"
        )
    codec = None if weights == "cache" else weights
    if codec is not None and not all(_is_coded_by(group) for group in sharded.groups):
        raise ValueError(
            f"weights={weights!r} takes CPU tensors, and groups of parameters that are gathered in one dtype of "
            "floating point: choose 'cache'"
        )
    if dist.get_rank() == 0:
        sizes = [shape_in_buffer(p).numel() * gathered_dtype(p).itemsize for p in sharded.parameters]
        _logger.warning(
            "weights=%r keeps a copy of all weights of the model in the memory of each rank's host: %.1f MiB",
            weights,
            sharded.group.size() * sum(sizes) / 2**20,
        )
    return [CachedGather(group, codec) for group in sharded.groups]


def _is_coded_by(group: Any) -> bool:
    """Return whether differences of a group's weights can be coded."""
    dtypes = {gathered_dtype(parameter) for parameter in group.fsdp_params}
    return group.device.type == "cpu" and len(dtypes) <= 1 and all(dtype.is_floating_point for dtype in dtypes)


def _algorithm_and_options(
    gradients: str, algorithm: str | None, options: dict[str, OptionArgument], *, is_hybrid: bool
) -> tuple[str, dict[str, OptionArgument]]:
    """Return which algorithm `gradients` and `algorithm` stand for, and all of its options."""
    if gradients in available_codecs():
        name = _BY_DEFAULT if algorithm is None else algorithm
        check_algorithm(name)
        if "codec" not in {option["name"] for option in describe(name)["options"]}:
            raise ValueError(f"algorithm {name!r} takes no codec: write compress(model, gradients={name!r}, ...)")
        # Of what goes to other ranks all residuals are kept: those of the whole model, on each rank.
        small = {} if is_hybrid or name != _BY_DEFAULT else {"residuals": "8bit"}
        given = {"codec": gradients, **small, **options}
    else:
        if gradients not in available_algorithms() or algorithm not in (None, gradients):
            raise ValueError(
                f"gradients={gradients!r}" + ("" if algorithm is None else f" with algorithm={algorithm!r}") + ": "
                f"expected a codec ({', '.join(available_codecs())}) or an algorithm that reduces gradients, such as "
                "'gradient_allreduce' or 'powersgd'"
            )
        name, given = gradients, options
    if describe(name)["optimizer"]:
        raise ValueError(
            f"algorithm {name!r} acts on weights and on what the optimizer does, which fully_shard keeps in shards: "
            "choose one that reduces gradients, such as 'quantized_allreduce', 'bytegrad' or 'powersgd'"
        )
    complete = _C.check_options(name, given, ["optimizer", "process_group"])
    if complete.get("average") is False:
        raise ValueError("average=False: FSDP2 itself says whether gradients are summed, set_gradient_divide_factor()")
    return name, dict(complete)


def compress(
    model: nn.Module,
    gradients: str = "int8",
    weights: str | None = None,
    *,
    algorithm: str | None = None,
    **options: OptionArgument,
) -> Handle:
    """Let an algorithm average the gradients of a sharded model between hosts. Collective, before the first step.

    On a mesh of two dimensions (HSDP) weights are sharded along the second one, and gradients reduce-scattered by FSDP2
    itself, in full precision; along the first one the algorithm averages the shards of gradients, in the place of
    FSDP2's all-reduce. On a mesh of one dimension it reduce-scatters the gradients. Everything else remains FSDP2's:
    mixed precision, accumulation with `set_requires_gradient_sync` and `set_requires_all_reduce`, divide factors,
    resharding, clipping.

    On CPU tensors the exchange of a group of parameters goes on while the backward computes the others. It is waited
    for at once where FSDP2 goes on computing with the result: gradients that accumulate in `.grad` or are kept in
    another dtype than they are reduced in, CPU offload, hooks on accumulated gradients, float16, and divide factors.

    Args:
        model: the module that was given to `fully_shard` last, around all others.
        gradients: the codec of gradients, one of `bagua.available_codecs()`; or the name of an algorithm that reduces
            gradients, such as "gradient_allreduce" (in full precision) or "powersgd" (on a mesh of two dimensions).
        weights: "cache", on a mesh of one dimension, to gather weights once a step and frozen ones once ever: each rank
            keeps a copy of the whole model in host memory. A codec, to gather coded differences to that copy (CPU
            tensors). None: FSDP2 gathers them for the forward and the backward.
        algorithm: which one codes the gradients; by default "quantized_allreduce", with error feedback where it helps.
        **options: the algorithm's options, see each algorithm's page.

    Returns:
        A handle as of `register_comm_hook`. `state_dict()` holds what this rank alone has.

    Raises:
        ValueError: a model or a setting that cannot be done right, which the message names; an unknown codec,
            algorithm or option; ranks that disagree.
        TypeError: an option of a wrong type.
        RuntimeError: `compress` is at work on the model already.
    """
    sharded = ShardedModel(model)
    group, device = sharded.group, sharded.device
    executors = executors_for(group, device)
    try:
        caches = _caches(sharded, weights)
        name, complete = _algorithm_and_options(gradients, algorithm, options, is_hybrid=sharded.is_hybrid)
        _C.check_names(name, complete, sharded.all_names)
        hook = _C.Hook(name, complete, executors, sharded.shapes())
        hook.use_parameters(sharded.names_and_roles * sharded.parts)
        if not sharded.is_hybrid:
            sharded.check_comms("reduce_scatter")
            if not hook.can_reduce_to_parts:
                raise ValueError(
                    f"algorithm {name!r} cannot reduce-scatter, which a mesh of one dimension takes: choose a codec, "
                    "'bytegrad', 'gradient_allreduce', or a mesh of two dimensions"
                )
    except Exception:
        # The others may have found nothing wrong, and wait for this rank; its own error is what the user has to see.
        with contextlib.suppress(Exception):
            _C.refuse_registration(executors, str(device))
        raise
    start(hook, group, device, sharded.description(), f" and weights={weights!r}")
    if sharded.is_hybrid and hook.keeps_residuals:
        hook.use_shards(executors_for(sharded.shards, device))
    reduction = ShardReduction(sharded, hook)
    reduction.attach()
    for cache in caches:
        cache.attach()
    if dist.get_rank() == 0:
        say_if_nothing_is_coded(hook, group)
    return _ShardedHandle(hook, reduction, caches)
