# SPDX-License-Identifier: Apache-2.0
"""Random messages between two ranks, and batches of them, each checked."""

import random
from typing import Any

import torch.distributed as dist
from soak_parts import Buffer, Side, Started, inputs_of, unset
from soak_plan import Call


def message(call: Call, side: Side) -> Started:
    """From the root to the receiver; the others have nothing to do."""
    inputs = inputs_of(call, side.size, call.numel)
    tag = call.seed % 3
    works: list[Any] = []
    if side.position == call.root:
        buffer = Buffer(inputs[call.root])
        peer = side.ranks[call.receiver]
        if call.is_async:
            works = [dist.isend(buffer.tensor, peer, side.group, tag)]
        else:
            dist.send(buffer.tensor, peer, side.group, tag)
    elif side.position == call.receiver:
        buffer = unset(call.numel, call)
        peer = side.ranks[call.root]
        if call.is_async:
            works = [dist.irecv(buffer.tensor, peer, side.group, tag)]
        else:
            dist.recv(buffer.tensor, peer, side.group, tag)
    else:
        return Started(call, lambda: None)
    return Started(call, lambda: buffer.expect(inputs[call.root], call, "message"), works)


def ring(call: Call, side: Side) -> Started:
    """Everybody sends to the next and receives from the previous."""
    inputs = inputs_of(call, side.size, call.numel)
    previous = (side.position - 1) % side.size
    source, result = Buffer(inputs[side.position]), unset(call.numel, call)
    transfers = [
        dist.P2POp(dist.isend, source.tensor, side.ranks[(side.position + 1) % side.size], side.group),
        dist.P2POp(dist.irecv, result.tensor, side.ranks[previous], side.group),
    ]
    if call.seed % 2:
        transfers.reverse()
    works = dist.batch_isend_irecv(transfers)
    return Started(call, lambda: result.expect(inputs[previous], call, "message"), list(works))


# Beyond those of _message(), and below those without room for a size.
_BATCH_TAG = 60_000
_ANYONE_TAGS = range(100, 50_000)


def batch(call: Call, side: Side) -> Started:
    """Messages between many pairs, several between some, which each rank issues in an order of its own."""
    inputs = inputs_of(call, side.size, call.numel)
    common, own = random.Random(call.seed), random.Random(f"{call.seed} {side.position}")
    transfers, received = [], []
    for number in range(3 * side.size):
        sender, receiver = common.sample(range(side.size), 2)
        content = inputs[sender][: common.randint(0, call.numel)]
        if side.position == sender:
            buffer = Buffer(content)
            peer = side.ranks[receiver]
            transfers.append(dist.P2POp(dist.isend, buffer.tensor, peer, side.group, _BATCH_TAG + number))
        elif side.position == receiver:
            buffer = unset(content.numel(), call)
            peer = side.ranks[sender]
            transfers.append(dist.P2POp(dist.irecv, buffer.tensor, peer, side.group, _BATCH_TAG + number))
            received.append((buffer, content))
    own.shuffle(transfers)
    # Torch takes no empty list.
    works = dist.batch_isend_irecv(transfers) if transfers else []

    def check() -> None:
        for buffer, content in received:
            buffer.expect(content, call, "message")

    return Started(call, check, list(works))


def from_anyone(call: Call, side: Side) -> Started:
    """Everybody sends to the root, which takes what comes and is told from whom."""
    inputs = inputs_of(call, side.size, call.numel)
    tag = _ANYONE_TAGS[call.number % len(_ANYONE_TAGS)]
    if side.position != call.root:
        source = Buffer(inputs[side.position])
        peer = side.ranks[call.root]
        if not call.is_async:
            dist.send(source.tensor, peer, side.group, tag)
            return Started(call, lambda: None)
        return Started(
            call,
            lambda: source.expect(inputs[side.position], call, "input"),
            [dist.isend(source.tensor, peer, side.group, tag)],
        )
    results = [unset(call.numel, call) for _ in range(side.size - 1)]
    works: list[Any] = []
    sources: list[int] = []
    for result in results:
        if call.is_async:
            works.append(dist.irecv(result.tensor, None, side.group, tag))
        else:
            sources.append(side.ranks.index(dist.recv(result.tensor, None, side.group, tag)))
    issued = tuple(works)

    def check() -> None:
        # Positions: a work tells the rank in its group.
        found = sources or [work._source_rank() for work in issued]
        if sorted(found) != [position for position in range(side.size) if position != call.root]:
            raise AssertionError(f"{call}: messages came from {found}")
        for position, result in zip(found, results, strict=True):
            result.expect(inputs[position], call, f"message from {position}")

    return Started(call, check, works)


# --- Others -----------------------------------------------------------------------------------------------------------
