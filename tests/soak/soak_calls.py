# SPDX-License-Identifier: Apache-2.0
"""How one rank makes a call of the plan, and how it knows that the result is right."""

import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import soak_messages
import torch
import torch.distributed as dist
from reference import reduce_op
from soak_parts import Buffer, Side, Started, inputs_of, moved, started, unset
from soak_plan import Call


def start(call: Call, side: Side) -> Started:
    """Make the call; one that is not asynchronous has ended on return."""
    return _STARTERS[call.kind](call, side)


# --- Reductions -------------------------------------------------------------------------------------------------------


def _all_reduce(call: Call, side: Side) -> Started:
    inputs = inputs_of(call, side.size, call.numel)
    buffer = Buffer(inputs[side.position])
    work = dist.all_reduce(buffer.tensor, reduce_op(call.op), side.group, call.is_async)
    return started(call, work, lambda: buffer.expect_reduced(inputs, call))


def _reduce(call: Call, side: Side) -> Started:
    inputs = inputs_of(call, side.size, call.numel)
    buffer = Buffer(inputs[side.position])
    work = dist.reduce(buffer.tensor, side.ranks[call.root], reduce_op(call.op), side.group, call.is_async)
    is_root = side.position == call.root

    def check() -> None:
        if is_root:
            buffer.expect_reduced(inputs, call)
        else:
            buffer.expect(inputs[side.position], call, "input")

    return started(call, work, check)


def _reduce_scatter(call: Call, side: Side) -> Started:
    inputs = inputs_of(call, side.size, call.numel * side.size)
    source, result = Buffer(inputs[side.position]), unset(call.numel, call)
    if call.kind == "reduce_scatter_list":
        parts = list(source.tensor.chunk(side.size)) if call.numel else [source.tensor] * side.size
        work = dist.reduce_scatter(result.tensor, parts, reduce_op(call.op), side.group, call.is_async)
    else:
        work = dist.reduce_scatter_tensor(result.tensor, source.tensor, reduce_op(call.op), side.group, call.is_async)

    def check() -> None:
        begin = side.position * call.numel
        result.expect_reduced(inputs[:, begin : begin + call.numel], call)
        source.expect(inputs[side.position], call, "input")

    return started(call, work, check)


def _rounding(call: Call, side: Side) -> Started:
    """A sum that rounds: near the exact one, and the same bits on all ranks."""
    inputs = (inputs_of(call, side.size, call.numel).double() / 7 + 1e-3 * call.root).to(call.dtype)
    buffer = Buffer(inputs[side.position])
    work = dist.all_reduce(buffer.tensor, dist.ReduceOp.SUM, side.group, call.is_async)

    def check() -> None:
        wide = inputs.double()
        # Each addition rounds a partial sum no larger than the sum of magnitudes.
        bound = side.size * torch.finfo(call.dtype).eps * wide.abs().sum(0)
        error = (buffer.tensor.double() - wide.sum(0)).abs()
        if not bool((error <= bound).all()):
            raise AssertionError(f"{call}: off by up to {error.max()}, allowed are {bound.max()}")
        # The order in which checks are made differs between ranks: a sum does not mind.
        side.checksum += zlib.crc32(buffer.tensor.view(torch.uint8).cpu().numpy()) ^ call.number

    return started(call, work, check)


# --- Moves ------------------------------------------------------------------------------------------------------------


def _broadcast(call: Call, side: Side) -> Started:
    inputs = inputs_of(call, side.size, call.numel)
    buffer = Buffer(inputs[side.position])
    work = dist.broadcast(buffer.tensor, side.ranks[call.root], side.group, call.is_async)
    return moved(call, work, (buffer, inputs[call.root], "result"))


def _all_gather(call: Call, side: Side) -> Started:
    inputs = inputs_of(call, side.size, call.numel)
    source = Buffer(inputs[side.position])
    kept = (source, inputs[side.position], "input")
    if call.kind == "all_gather":
        result = unset(call.numel * side.size, call)
        work = dist.all_gather_into_tensor(result.tensor, source.tensor, side.group, call.is_async)
        return moved(call, work, (result, inputs.flatten(), "result"), kept)
    results = [unset(call.numel, call) for _ in side.ranks]
    work = dist.all_gather([result.tensor for result in results], source.tensor, side.group, call.is_async)
    return moved(call, work, *((result, row, "result") for result, row in zip(results, inputs, strict=True)), kept)


def _all_to_all(call: Call, side: Side) -> Started:
    inputs = inputs_of(call, side.size, call.numel * side.size)
    source, result = Buffer(inputs[side.position]), unset(call.numel * side.size, call)
    work = dist.all_to_all_single(result.tensor, source.tensor, group=side.group, async_op=call.is_async)
    begin = side.position * call.numel
    expected = inputs[:, begin : begin + call.numel].flatten()
    return moved(call, work, (result, expected, "result"), (source, inputs[side.position], "input"))


def _all_to_all_uneven(call: Call, side: Side) -> Started:
    random_numbers = random.Random(call.seed)
    # sizes[i][j]: what rank i has for rank j.
    sizes = [[random_numbers.randint(0, call.numel) for _ in side.ranks] for _ in side.ranks]
    inputs = inputs_of(call, side.size, call.numel * side.size)
    own = sizes[side.position]
    incoming = [row[side.position] for row in sizes]
    source, result = Buffer(inputs[side.position][: sum(own)]), unset(sum(incoming), call)
    if call.kind == "all_to_all_list":
        work = dist.all_to_all(
            list(result.tensor.split(incoming)), list(source.tensor.split(own)), side.group, call.is_async
        )
    else:
        work = dist.all_to_all_single(result.tensor, source.tensor, incoming, own, side.group, call.is_async)
    parts = [inputs[peer, sum(row[: side.position]) : sum(row[: side.position + 1])] for peer, row in enumerate(sizes)]
    return moved(call, work, (result, torch.cat(parts), "result"))


def _gather(call: Call, side: Side) -> Started:
    inputs = inputs_of(call, side.size, call.numel)
    source = Buffer(inputs[side.position])
    results = [unset(call.numel, call) for _ in side.ranks] if side.position == call.root else []
    places = [result.tensor for result in results] or None
    work = dist.gather(source.tensor, places, side.ranks[call.root], side.group, call.is_async)
    gathered = ((result, row, "result") for result, row in zip(results, inputs, strict=False))
    return moved(call, work, *gathered, (source, inputs[side.position], "input"))


def _scatter(call: Call, side: Side) -> Started:
    inputs = inputs_of(call, side.size, call.numel)
    sources = [Buffer(row) for row in inputs] if side.position == call.root else []
    result = unset(call.numel, call)
    given = [source.tensor for source in sources] or None
    work = dist.scatter(result.tensor, given, side.ranks[call.root], side.group, call.is_async)
    return moved(call, work, (result, inputs[side.position], "result"))


# --- Messages ---------------------------------------------------------------------------------------------------------


def _barrier(call: Call, side: Side) -> Started:
    return started(call, dist.barrier(side.group, call.is_async), lambda: None)


# What one coalescing manager takes of each; with a device it takes others, mixed.
_COALESCED = ("all_reduce", "all_gather", "reduce_scatter")
_COALESCED_ON_DEVICE = ("broadcast", "all_to_all", "all_gather_list", "gather")


def _coalesced(call: Call, side: Side) -> Started:
    random_numbers = random.Random(call.seed)
    count, is_on_device = random_numbers.randint(1, 4), random_numbers.random() < 0.4
    kinds = [random_numbers.choice(_COALESCED)] * count
    if is_on_device:
        kinds = random_numbers.choices(_COALESCED_ON_DEVICE, k=count)
    parts = [
        replace(
            call,
            kind=kind,
            numel=random_numbers.randint(0, call.numel),
            offset=max(0, call.offset - place),  # so that equal sizes differ in their values
            is_async=True,  # all are waited for at the end
        )
        for place, kind in enumerate(kinds)
    ]
    device = torch.get_default_device() if is_on_device else None
    with dist._coalescing_manager(side.group, device, async_ops=call.is_async) as manager:  # type: ignore[attr-defined]
        made = [_STARTERS[part.kind](part, side) for part in parts]

    def check() -> None:
        for one in made:
            one.check()

    return Started(call, check, list(manager.works))


def _objects(call: Call, side: Side) -> Started:
    gathered: list[Any] = [None] * side.size
    dist.all_gather_object(gathered, {"position": side.position, "padding": "x" * (side.position * 50)}, side.group)
    sent: list[Any] = [("from", call.number)] if side.position == call.root else [None]
    dist.broadcast_object_list(sent, side.ranks[call.root], side.group)

    def check() -> None:
        expected = [{"position": position, "padding": "x" * (position * 50)} for position in range(side.size)]
        if gathered != expected or sent != [("from", call.number)]:
            raise AssertionError(f"{call}: got {gathered} and {sent}")

    return Started(call, check)


_STARTERS: dict[str, Callable[[Call, Side], Started]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_list": _reduce_scatter,
    "rounding": _rounding,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_list": _all_gather,
    "all_to_all": _all_to_all,
    "all_to_all_uneven": _all_to_all_uneven,
    "all_to_all_list": _all_to_all_uneven,
    "gather": _gather,
    "scatter": _scatter,
    "message": soak_messages.message,
    "ring": soak_messages.ring,
    "batch": soak_messages.batch,
    "from_anyone": soak_messages.from_anyone,
    "coalesced": _coalesced,
    "barrier": _barrier,
    "objects": _objects,
}
