# SPDX-License-Identifier: Apache-2.0
"""How one rank makes a call of the plan, and how it knows that the result is right."""

import functools
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from devices import here
from reference import reduce_op, reduced
from soak_plan import POOL_LENGTH, Call
from torch import Tensor


@functools.cache
def _pool() -> Tensor:
    """Small enough that no reduction over eight ranks rounds in any dtype."""
    generator = torch.Generator().manual_seed(7)
    return here(torch.randint(-3, 4, (POOL_LENGTH,), generator=generator, dtype=torch.int8, device="cpu"))


_GUARD_BYTES = 64
_GUARD_VALUE = 0xA5


@dataclass
class Side:
    """This rank's view of a group."""

    group: Any
    # Ranks of the world, in the order of their positions in the group.
    ranks: list[int]
    position: int
    # Of all results that rounding has a part in: equal on all members.
    checksum: int = 0

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


@dataclass
class Started:
    """A call that this rank has made, and the check of its result, which may be made when all works are done."""

    call: Call
    check: Callable[[], None]
    works: list[Any] = field(default_factory=list)


def start(call: Call, side: Side) -> Started:
    """Make the call; one that is not asynchronous has ended on return."""
    return _STARTERS[call.kind](call, side)


class _Buffer:
    """A tensor between two strips of memory that nobody may write."""

    def __init__(self, content: Tensor) -> None:
        item = content.element_size()
        self._bytes = torch.full((content.numel() * item + 2 * _GUARD_BYTES,), _GUARD_VALUE, dtype=torch.uint8)
        self.tensor = self._bytes[_GUARD_BYTES : _GUARD_BYTES + content.numel() * item].view(content.dtype)
        self.tensor.copy_(content)

    def expect_reduced(self, inputs: Tensor, call: Call) -> None:
        """Expect the reduction of the rows."""
        exact = inputs.to(torch.complex128 if call.dtype.is_complex else torch.float64)
        self.expect(reduced(list(inputs), call.op), call, "result", sizes=exact.abs().mean(0))

    def expect(self, expected: Tensor, call: Call, role: str, sizes: Tensor | None = None) -> None:
        if not torch.equal(self.tensor, expected) and not self._is_rounded(expected, call, sizes):
            wrong = (self.tensor != expected).nonzero().flatten()
            first = int(wrong[0])
            raise AssertionError(
                f"{call}: {role} is wrong in {wrong.numel()} of {expected.numel()} elements, the first at {first}: "
                f"expected {expected[first]}, got {self.tensor[first]}"
            )
        for strip in (self._bytes[:_GUARD_BYTES], self._bytes[-_GUARD_BYTES:]):
            if bool((strip != _GUARD_VALUE).any()):
                raise AssertionError(f"{call}: memory beside the {role} was written: {strip.tolist()}")

    def _is_rounded(self, expected: Tensor, call: Call, sizes: Tensor | None) -> bool:
        """Whether all that differs is the division of a mean, by the number of ranks or by its rounded inverse.

        Between hosts 16-bit parts are divided before they are added: their sizes count, which may cancel.
        """
        if call.op != "AVG" or not (call.dtype.is_floating_point or call.dtype.is_complex) or sizes is None:
            return False
        return bool(((self.tensor - expected).abs() <= 2 * torch.finfo(call.dtype).eps * sizes).all())


def _inputs(call: Call, size: int, numel: int) -> Tensor:
    """What each rank puts in, a row per rank."""
    return _cast(_pool().as_strided((size, numel), (call.stride, 1), call.offset), call)


def _cast(raw: Tensor, call: Call) -> Tensor:
    dtype = call.dtype
    if dtype == torch.bool:
        return raw > 0
    if call.op == "PRODUCT":
        # Factors whose product stays small; bytes may wrap, which all do alike.
        odd = raw & 1
        return (1 + odd if dtype == torch.uint8 else 1 - 2 * odd).to(dtype)
    if dtype == torch.uint8:
        return raw.abs().to(dtype)
    if dtype.is_complex:
        return torch.complex(raw.double(), -raw.double() + 1).to(dtype)
    return raw.to(dtype)


def _unset(numel: int, call: Call) -> _Buffer:
    """For a result: no value of the pool."""
    return _Buffer(torch.full((numel,), True if call.dtype == torch.bool else 99).to(call.dtype))


def _started(call: Call, work: Any, check: Callable[[], None]) -> Started:
    return Started(call, check, [work] if call.is_async and work is not None else [])


# --- Reductions -------------------------------------------------------------------------------------------------------


def _all_reduce(call: Call, side: Side) -> Started:
    inputs = _inputs(call, side.size, call.numel)
    buffer = _Buffer(inputs[side.position])
    work = dist.all_reduce(buffer.tensor, reduce_op(call.op), side.group, call.is_async)
    return _started(call, work, lambda: buffer.expect_reduced(inputs, call))


def _reduce(call: Call, side: Side) -> Started:
    inputs = _inputs(call, side.size, call.numel)
    buffer = _Buffer(inputs[side.position])
    work = dist.reduce(buffer.tensor, side.ranks[call.root], reduce_op(call.op), side.group, call.is_async)
    is_root = side.position == call.root

    def check() -> None:
        if is_root:
            buffer.expect_reduced(inputs, call)
        else:
            buffer.expect(inputs[side.position], call, "input")

    return _started(call, work, check)


def _reduce_scatter(call: Call, side: Side) -> Started:
    inputs = _inputs(call, side.size, call.numel * side.size)
    source, result = _Buffer(inputs[side.position]), _unset(call.numel, call)
    if call.kind == "reduce_scatter_list":
        parts = list(source.tensor.chunk(side.size)) if call.numel else [source.tensor] * side.size
        work = dist.reduce_scatter(result.tensor, parts, reduce_op(call.op), side.group, call.is_async)
    else:
        work = dist.reduce_scatter_tensor(result.tensor, source.tensor, reduce_op(call.op), side.group, call.is_async)

    def check() -> None:
        begin = side.position * call.numel
        result.expect_reduced(inputs[:, begin : begin + call.numel], call)
        source.expect(inputs[side.position], call, "input")

    return _started(call, work, check)


def _rounding(call: Call, side: Side) -> Started:
    """A sum that rounds: near the exact one, and the same bits on all ranks."""
    inputs = (_inputs(call, side.size, call.numel).double() / 7 + 1e-3 * call.root).to(call.dtype)
    buffer = _Buffer(inputs[side.position])
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

    return _started(call, work, check)


# --- Moves ------------------------------------------------------------------------------------------------------------


def _broadcast(call: Call, side: Side) -> Started:
    inputs = _inputs(call, side.size, call.numel)
    buffer = _Buffer(inputs[side.position])
    work = dist.broadcast(buffer.tensor, side.ranks[call.root], side.group, call.is_async)
    return _started(call, work, lambda: buffer.expect(inputs[call.root], call, "result"))


def _all_gather(call: Call, side: Side) -> Started:
    inputs = _inputs(call, side.size, call.numel)
    source = _Buffer(inputs[side.position])
    if call.kind == "all_gather":
        results = [_unset(call.numel * side.size, call)]
        expected = [inputs.flatten()]
        work = dist.all_gather_into_tensor(results[0].tensor, source.tensor, side.group, call.is_async)
    else:
        results = [_unset(call.numel, call) for _ in side.ranks]
        expected = list(inputs)
        work = dist.all_gather([result.tensor for result in results], source.tensor, side.group, call.is_async)

    def check() -> None:
        for result, wanted in zip(results, expected, strict=True):
            result.expect(wanted, call, "result")
        source.expect(inputs[side.position], call, "input")

    return _started(call, work, check)


def _all_to_all(call: Call, side: Side) -> Started:
    inputs = _inputs(call, side.size, call.numel * side.size)
    source, result = _Buffer(inputs[side.position]), _unset(call.numel * side.size, call)
    work = dist.all_to_all_single(result.tensor, source.tensor, group=side.group, async_op=call.is_async)

    def check() -> None:
        begin = side.position * call.numel
        result.expect(inputs[:, begin : begin + call.numel].flatten(), call, "result")
        source.expect(inputs[side.position], call, "input")

    return _started(call, work, check)


def _all_to_all_uneven(call: Call, side: Side) -> Started:
    random_numbers = random.Random(call.seed)
    # sizes[i][j]: what rank i has for rank j.
    sizes = [[random_numbers.randint(0, call.numel) for _ in side.ranks] for _ in side.ranks]
    inputs = _inputs(call, side.size, call.numel * side.size)
    own = sizes[side.position]
    incoming = [row[side.position] for row in sizes]
    source, result = _Buffer(inputs[side.position][: sum(own)]), _unset(sum(incoming), call)
    if call.kind == "all_to_all_list":
        work = dist.all_to_all(
            list(result.tensor.split(incoming)), list(source.tensor.split(own)), side.group, call.is_async
        )
    else:
        work = dist.all_to_all_single(result.tensor, source.tensor, incoming, own, side.group, call.is_async)

    def check() -> None:
        begins = [sum(row[: side.position]) for row in sizes]
        parts = [
            inputs[peer][begin : begin + length]
            for peer, (begin, length) in enumerate(zip(begins, incoming, strict=True))
        ]
        result.expect(torch.cat(parts), call, "result")

    return _started(call, work, check)


def _gather(call: Call, side: Side) -> Started:
    inputs = _inputs(call, side.size, call.numel)
    source = _Buffer(inputs[side.position])
    is_root = side.position == call.root
    results = [_unset(call.numel, call) for _ in side.ranks] if is_root else []
    work = dist.gather(
        source.tensor,
        [result.tensor for result in results] if is_root else None,
        side.ranks[call.root],
        side.group,
        call.is_async,
    )

    def check() -> None:
        for result, wanted in zip(results, inputs, strict=False):
            result.expect(wanted, call, "result")
        source.expect(inputs[side.position], call, "input")

    return _started(call, work, check)


def _scatter(call: Call, side: Side) -> Started:
    inputs = _inputs(call, side.size, call.numel)
    is_root = side.position == call.root
    sources = [_Buffer(row) for row in inputs] if is_root else []
    result = _unset(call.numel, call)
    work = dist.scatter(
        result.tensor,
        [source.tensor for source in sources] if is_root else None,
        side.ranks[call.root],
        side.group,
        call.is_async,
    )
    return _started(call, work, lambda: result.expect(inputs[side.position], call, "result"))


# --- Messages ---------------------------------------------------------------------------------------------------------


def _message(call: Call, side: Side) -> Started:
    """From the root to the receiver; the others have nothing to do."""
    inputs = _inputs(call, side.size, call.numel)
    tag = call.seed % 3
    works: list[Any] = []
    if side.position == call.root:
        buffer = _Buffer(inputs[call.root])
        peer = side.ranks[call.receiver]
        if call.is_async:
            works = [dist.isend(buffer.tensor, peer, side.group, tag)]
        else:
            dist.send(buffer.tensor, peer, side.group, tag)
    elif side.position == call.receiver:
        buffer = _unset(call.numel, call)
        peer = side.ranks[call.root]
        if call.is_async:
            works = [dist.irecv(buffer.tensor, peer, side.group, tag)]
        else:
            dist.recv(buffer.tensor, peer, side.group, tag)
    else:
        return Started(call, lambda: None)
    return Started(call, lambda: buffer.expect(inputs[call.root], call, "message"), works)


def _ring(call: Call, side: Side) -> Started:
    """Everybody sends to the next and receives from the previous."""
    inputs = _inputs(call, side.size, call.numel)
    previous = (side.position - 1) % side.size
    source, result = _Buffer(inputs[side.position]), _unset(call.numel, call)
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


def _batch(call: Call, side: Side) -> Started:
    """Messages between many pairs, several between some, which each rank issues in an order of its own."""
    inputs = _inputs(call, side.size, call.numel)
    common, own = random.Random(call.seed), random.Random(f"{call.seed} {side.position}")
    transfers, received = [], []
    for number in range(3 * side.size):
        sender, receiver = common.sample(range(side.size), 2)
        content = inputs[sender][: common.randint(0, call.numel)]
        if side.position == sender:
            buffer = _Buffer(content)
            peer = side.ranks[receiver]
            transfers.append(dist.P2POp(dist.isend, buffer.tensor, peer, side.group, _BATCH_TAG + number))
        elif side.position == receiver:
            buffer = _unset(content.numel(), call)
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


def _from_anyone(call: Call, side: Side) -> Started:
    """Everybody sends to the root, which takes what comes and is told from whom."""
    inputs = _inputs(call, side.size, call.numel)
    tag = _ANYONE_TAGS[call.number % len(_ANYONE_TAGS)]
    if side.position != call.root:
        source = _Buffer(inputs[side.position])
        peer = side.ranks[call.root]
        if not call.is_async:
            dist.send(source.tensor, peer, side.group, tag)
            return Started(call, lambda: None)
        return Started(
            call,
            lambda: source.expect(inputs[side.position], call, "input"),
            [dist.isend(source.tensor, peer, side.group, tag)],
        )
    results = [_unset(call.numel, call) for _ in range(side.size - 1)]
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


def _barrier(call: Call, side: Side) -> Started:
    return _started(call, dist.barrier(side.group, call.is_async), lambda: None)


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
        started = [_STARTERS[part.kind](part, side) for part in parts]

    def check() -> None:
        for one in started:
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
    "message": _message,
    "ring": _ring,
    "batch": _batch,
    "from_anyone": _from_anyone,
    "coalesced": _coalesced,
    "barrier": _barrier,
    "objects": _objects,
}
