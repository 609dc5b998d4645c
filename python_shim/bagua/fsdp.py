# SPDX-License-Identifier: Apache-2.0
"""Models that `fully_shard` has sharded, with their gradients coded where the network is slow::

    mesh = init_device_mesh("cpu", (hosts, ranks_per_host), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    handle = bagua.fsdp.compress(model, gradients="int8")

Inside a host the model is sharded, in full precision; between hosts the gradients of the shards are averaged, coded. On
a mesh of one dimension gradients are reduce-scattered, coded, and weights="cache" gathers weights once a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from bagua._argument_checks import check_algorithm, check_optimizer_type
from bagua._attachment import check_numbers, check_optimizer, is_linear, say_if_nothing_is_coded, scaler_of, unwrapped
from bagua._executors import executors_for, refuse, start
from bagua._handle import Handle, OptionArgument, check_scaler
from bagua._layers import layers_of
from bagua._native import _C
from bagua._registry import available_algorithms, available_codecs, describe
from bagua._sharded import ShardReduction
from bagua._sharded_model import ShardedModel
from bagua._sharded_rounds import ShardedRounds, check_rounds, is_in_rounds, warn_of_replicas_inside_hosts
from bagua._states import StatesOfAllRanks
from bagua._stats import ShardedStats
from bagua._torch_private import default_group, gathered_dtype, reshards_to_another_mesh, shape_in_buffer
from bagua._weight_cache import CachedGather, FrozenWeights

__all__ = ["compress"]

_BY_DEFAULT = "quantized_allreduce"
_logger = logging.getLogger("bagua")


class _ShardedHandle(Handle):
    """The handle of an algorithm at work on a sharded model; state and figures are those of this rank's shards."""

    def __init__(
        self,
        hook: _C.Hook,
        reduction: ShardReduction,
        caches: list[CachedGather],
        frozen: FrozenWeights | None,
        rounds: ShardedRounds | None,
    ) -> None:
        # A checkpoint is this rank's alone, whatever dimension of the mesh it differs in.
        super().__init__(hook, None, None, default_group())
        self._reduction = reduction
        self._caches = caches
        self._frozen = frozen
        self._rounds = rounds

    def stats(self) -> ShardedStats:
        """See `ShardedStats`; `memory` has what weights="cache" keeps."""
        stats = super().stats()
        if self._caches:
            stats["memory"]["gathered weights"] = sum(cache.bytes for cache in self._caches)
        return {
            **stats,
            "gathers": sum(cache.gathers for cache in self._caches),
            "gathered_bytes": sum(cache.given_bytes for cache in self._caches),
        }

    def __str__(self) -> str:
        stats = self.stats()
        gathers = f"\n  {stats['gathers']:,} gathers of weights, {stats['gathered_bytes']:,} bytes given to them"
        return super().__str__() + (gathers if self._caches else "")

    def reset(self) -> None:
        super().reset()
        for cache in self._caches:
            cache.gathers = cache.given_bytes = 0

    def state_dict(self) -> dict[str, Any]:
        """See `Handle.state_dict`; each rank has to save its own. In rounds it is collective among ranks of a host."""
        if self._rounds is not None:
            self._rounds.show_last_gradients()
        own = {**super().state_dict(), "buckets": self._reduction.buckets, "place": self._reduction.place}
        for cache in self._caches:
            own["state"] |= cache.state()
        return own

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse the state of other shards, of which some would fit in length. The rest goes on with any."""
        state = dict(state_dict["state"])
        is_other = state_dict.get("place", self._reduction.place) != self._reduction.place
        if is_other and state:
            advice = (
                "Pass {**checkpoint, 'state': {}}, which begins without residuals"
                if self._rounds is None
                else "Do without this one, and begin a round: call handle.synchronize() before a checkpoint for that"
            )
            raise ValueError(
                "the checkpoint has the state of other shards: of more or fewer ranks, of other parameters, or placed "
                f"otherwise. Model and optimizer go on with any. {advice}"
            )
        held = {name: state.pop(name) for name in list(state) if name.startswith("held.")}
        super()._load({**state_dict, "state": state, "layout": [] if is_other else state_dict["layout"]})
        self._reduction.buckets = {} if is_other else state_dict.get("buckets", {})
        for cache in self._caches:
            cache.load(held)

    def of_all_ranks(self) -> StatesOfAllRanks:
        """See `Handle.of_all_ranks`; not of algorithms in rounds, between which hosts have weights of their own."""
        if self._rounds is not None:
            raise RuntimeError(
                f"of_all_ranks() holds no weights, which differ between hosts with algorithm {self.algorithm!r}: save "
                "model, optimizer and handle.state_dict() on each rank"
            )
        return super().of_all_ranks()

    def synchronize(self) -> None:
        """See `Handle.synchronize`; buffers stay as they are, unless they are averaged."""
        self._between_steps(super().synchronize)

    def abort(self) -> None:
        """See `Handle.abort`; buffers stay as they are, unless they are averaged."""
        self._between_steps(super().abort)

    def _between_steps(self, call: Callable[[], None]) -> None:
        if self._rounds is None:
            call()
        else:
            self._rounds.show_last_gradients()
            self._rounds.changing_weights(call)

    def remove(self) -> None:
        """See `Handle.remove`; `compress` then takes the model again."""
        if self.is_removed:
            return
        if self._rounds is None:
            super().remove()
        else:
            self._rounds.leave()
            self._is_removed = True
        self._reduction.detach()
        for cache in self._caches:
            cache.detach()
        if self._frozen is not None:
            self._frozen.remove()


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
    if weights != "cache" and not all(_is_coded_by(group) for group in sharded.groups):
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
    names = {id(p): name for p, (name, _) in zip(sharded.parameters, sharded.names_and_roles, strict=True)}
    said: set[str] = set()
    return [
        CachedGather(group, number, [names[id(parameter)] for parameter in group.fsdp_params], weights, said)
        for number, group in enumerate(sharded.groups)
    ]


def _is_coded_by(group: Any) -> bool:
    """Return whether differences of a group's weights can be coded."""
    dtypes = {gathered_dtype(parameter) for parameter in group.fsdp_params}
    return group.device.type == "cpu" and len(dtypes) <= 1 and all(dtype.is_floating_point for dtype in dtypes)


def _algorithm_and_options(
    gradients: str, algorithm: str | None, options: dict[str, OptionArgument], *, is_hybrid: bool
) -> tuple[str, dict[str, OptionArgument]]:
    """Return which algorithm `gradients` and `algorithm` stand for, and all of its options."""
    if "process_group" in options:
        raise ValueError(
            "compress() takes no process_group: gradients are exchanged along the first dimension of the mesh that "
            "fully_shard was given"
        )
    if gradients in available_codecs():
        if "codec" in options:
            raise ValueError(
                f"gradients={gradients!r} and codec={options['codec']!r} are two codecs of the same: name one of "
                f"bagua.available_codecs() in gradients=, and several by gradients={algorithm or _BY_DEFAULT!r}, "
                f"codec={options['codec']!r}"
            )
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
    if describe(name)["optimizer"] and not is_in_rounds(name):
        raise ValueError(
            f"algorithm {name!r} acts on weights and on what the optimizer does, which fully_shard keeps in shards: "
            "choose one that reduces gradients, such as 'quantized_allreduce', 'bytegrad' or 'powersgd', or one that "
            "trains in rounds, 'local_sgd' or 'diloco'"
        )
    complete = _C.check_options(name, given, ["weights", "algorithm", "optimizer"])
    if complete.get("average") is False:
        raise ValueError("average=False: FSDP2 itself says whether gradients are summed, set_gradient_divide_factor()")
    return name, dict(complete)


def compress(
    model: nn.Module,
    gradients: str = "int8",
    weights: str | None = None,
    *,
    algorithm: str | None = None,
    optimizer: Optimizer | None = None,
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

    With "local_sgd" and "diloco", on a mesh of two dimensions, each host trains on its own, and between hosts shards of
    weights are exchanged every `sync_every` steps of the optimizer.

    Args:
        model: the module that was given to `fully_shard` last, around all others.
        gradients: the codec of gradients, one of `bagua.available_codecs()`; or the name of an algorithm that reduces
            gradients, such as "gradient_allreduce" (in full precision) or "powersgd" (on a mesh of two dimensions); or
            "local_sgd" or "diloco".
        weights: "cache", on a mesh of one dimension, to gather weights once a step and frozen ones once ever: each rank
            keeps a copy of the whole model in host memory. A codec, to gather coded differences to that copy (CPU
            tensors). None: FSDP2 gathers them for the forward and the backward.
        algorithm: which one codes the gradients; by default "quantized_allreduce", with error feedback where it helps.
        optimizer: the one that trains the model, made after `fully_shard`: "local_sgd" and "diloco" need it. Others
            choose by it whether 2 bits have error feedback. The loss scale of accelerate's optimizer is followed.
        **options: the algorithm's options, see each algorithm's page.

    Returns:
        A handle as of `register_comm_hook`. `state_dict()` holds what this rank alone has.

    Raises:
        ValueError: a model or a setting that cannot be done right, which the message names; an unknown codec,
            algorithm or option; ranks that disagree.
        TypeError: an option of a wrong type.
        RuntimeError: `compress` is at work on the model already.
    """
    scaler, optimizer = scaler_of(optimizer), unwrapped(optimizer)
    sharded = ShardedModel(model)
    group, device, rounds = sharded.group, sharded.device, None
    executors = executors_for(group, device)
    shards = executors_for(sharded.shards, device) if sharded.is_hybrid else None
    try:
        caches = _caches(sharded, weights)
        name, complete = _algorithm_and_options(gradients, algorithm, options, is_hybrid=sharded.is_hybrid)
        _C.check_names(name, complete, sharded.all_names)
        check_numbers(sharded.trained, name)
        check_optimizer_type(name, optimizer, is_by_name=True)
        if is_in_rounds(name):
            check_rounds(sharded, model, optimizer, name)
            rounds = ShardedRounds(model, sharded)
        hook = _C.Hook(name, complete, executors, sharded.shapes() if rounds is None else rounds.shards)
        hook.use_parameters(
            sharded.names_and_roles * sharded.parts,
            [parameter.sharded_param.numel() for parameter in sharded.parameters] * sharded.parts,
        )
        if rounds is not None:
            hook.use_model(layers_of(names for names, _ in sharded.names_and_roles), list(model.buffers()))
        elif optimizer is not None:
            check_optimizer(sharded.trained, optimizer, name)
            hook.use_optimizer(is_linear([optimizer]))
        if not sharded.is_hybrid:
            sharded.check_comms("reduce_scatter")
            if not hook.can_reduce_to_parts:
                raise ValueError(
                    f"algorithm {name!r} cannot reduce-scatter, which a mesh of one dimension takes: choose a codec, "
                    "'bytegrad', 'gradient_allreduce', or a mesh of two dimensions"
                )
        if shards is not None:
            hook.use_shards(shards)
        if scaler is not None and hook.keeps_residuals:
            check_scaler(scaler)
    except Exception:
        for one in (shards, executors):
            if one is not None:
                refuse(one, device)
        raise
    start(hook, group, device, sharded.description(), f" and weights={weights!r}")
    reduction = ShardReduction(sharded, hook, None if rounds is None else rounds.after_backward)
    reduction.attach()
    if rounds is not None and optimizer is not None:
        rounds.attach(hook, optimizer)
        warn_of_replicas_inside_hosts(sharded, name)
    for cache in caches:
        cache.attach(sharded)
    frozen = FrozenWeights(model, caches, group) if caches and device.type == "cpu" else None
    if dist.get_rank() == 0:
        say_if_nothing_is_coded(hook, group)
    handle = _ShardedHandle(hook, reduction, caches, frozen, rounds)
    if scaler is not None and handle.keeps_residuals:
        handle.follow(scaler)
    return handle
