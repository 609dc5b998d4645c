# SPDX-License-Identifier: Apache-2.0
"""Models that `fully_shard` has sharded, with their gradients coded where the network is slow::

    mesh = init_device_mesh("cpu", (hosts, ranks_per_host), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    handle = bagua.fsdp.compress(model, gradients="int8")

Inside a host the model is sharded, in full precision; between hosts the gradients of the shards are averaged, coded.
"""

from __future__ import annotations

import contextlib

import torch.distributed as dist
from torch import nn

from bagua._argument_checks import check_algorithm
from bagua._attachment import say_if_nothing_is_coded
from bagua._executors import executors_for, start
from bagua._native import _C
from bagua._registry import available_algorithms, available_codecs, describe
from bagua._sharded import ShardedModel, ShardReduction
from bagua._torch_private import default_group
from bagua.handle import Handle, OptionArgument

__all__ = ["compress"]

_BY_DEFAULT = "quantized_allreduce"


class _ShardedHandle(Handle):
    """The handle of an algorithm at work on a sharded model; state and figures are those of this rank's shards."""

    def __init__(self, hook: _C.Hook, reduction: ShardReduction) -> None:
        # A checkpoint is this rank's alone, whatever dimension of the mesh it differs in.
        super().__init__(hook, None, None, default_group())
        self._reduction = reduction

    def remove(self) -> None:
        """See `Handle.remove`; `compress` then takes the model again."""
        if not self.is_removed:
            super().remove()
            self._reduction.detach()


def _algorithm_and_options(
    gradients: str, algorithm: str | None, options: dict[str, OptionArgument]
) -> tuple[str, dict[str, OptionArgument]]:
    """Return which algorithm `gradients` and `algorithm` stand for, and all of its options."""
    if gradients in available_codecs():
        name = _BY_DEFAULT if algorithm is None else algorithm
        check_algorithm(name)
        if "codec" not in {option["name"] for option in describe(name)["options"]}:
            raise ValueError(f"algorithm {name!r} takes no codec: write compress(model, gradients={name!r}, ...)")
        given = {"codec": gradients, **options}
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

    The model was sharded by `fully_shard` on a mesh of two dimensions (HSDP): along the second one weights are sharded
    and gradients reduce-scattered by FSDP2 itself, in full precision; along the first one the shards of gradients are
    averaged by the algorithm, in the place of FSDP2's all-reduce. Everything else remains FSDP2's: mixed precision,
    accumulation with `set_requires_gradient_sync` and `set_requires_all_reduce`, divide factors, resharding, clipping.

    On CPU tensors the exchange of a group of parameters goes on while the backward computes the others. It is waited
    for at once where FSDP2 goes on computing with the result: gradients that accumulate in `.grad` or are kept in
    another dtype than they are reduced in, CPU offload, hooks on accumulated gradients, float16, and divide factors.

    Args:
        model: the module that was given to `fully_shard` last, around all others.
        gradients: the codec of gradients, one of `bagua.available_codecs()`; or the name of an algorithm that reduces
            gradients, such as "gradient_allreduce" (in full precision) or "powersgd".
        weights: has to be None: on such a mesh weights are gathered along the second dimension, inside a host.
        algorithm: which one codes the gradients; by default "quantized_allreduce", with error feedback by shard.
        **options: the algorithm's options, see each algorithm's page.

    Returns:
        A handle as of `register_comm_hook`. `state_dict()` holds what this rank has of its shards.

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
        if weights is not None:
            raise ValueError(
                f"weights={weights!r} is for a mesh of one dimension between hosts; on this mesh weights are gathered "
                "along its second dimension, inside a host"
            )
        name, complete = _algorithm_and_options(gradients, algorithm, options)
        _C.check_names(name, complete, sharded.all_names)
        hook = _C.Hook(name, complete, executors, sharded.shapes())
        hook.use_parameters(sharded.names_and_roles)
    except Exception:
        # The others may have found nothing wrong, and wait for this rank; its own error is what the user has to see.
        with contextlib.suppress(Exception):
            _C.refuse_registration(executors, str(device))
        raise
    start(hook, group, device, sharded.description(), "")
    reduction = ShardReduction(sharded, hook)
    reduction.attach()
    if dist.get_rank() == 0:
        say_if_nothing_is_coded(hook, group)
    return _ShardedHandle(hook, reduction)
