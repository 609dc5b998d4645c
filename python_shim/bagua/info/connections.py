# SPDX-License-Identifier: Apache-2.0
"""What the kernel has seen of this process's TCP connections, whoever has opened them."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

# Places in the kernel's struct tcp_info, each of 32 bits; older kernels tell less.
_ROUND_TRIP, _RESENT, _LEAST_ROUND_TRIP, _SEGMENTS = 68, 100, 148, 156
_KNOWN_BYTES = 160
_ESTABLISHED = 1
_NOT_YET = 0xFFFFFFFF


@dataclass(frozen=True)
class Connection:
    """What the kernel has counted of one connection since it was opened, and its times in seconds."""

    congestion: str
    segments: int
    resent: int
    round_trip: float
    least_round_trip: float


@dataclass(frozen=True)
class Line:
    """What connections saw of the line between two moments; `bagua._stats.LineStats` has the same words.

    Attributes:
        segments: packets with data that were sent, those sent again included.
        resent: packets that the kernel took for lost and sent again.
    """

    congestion: tuple[str, ...] = ()
    segments: int = 0
    resent: int = 0
    round_trip: float = 0.0
    least_round_trip: float = 0.0

    @property
    def resent_share(self) -> float:
        """The part of the packets that was sent again: an upper limit of what the line has lost."""
        return self.resent / max(self.segments, 1)


Connections = Mapping[tuple[str, str], Connection]


def connections() -> Connections:
    """Return the connections of this process to other addresses, by their two ends.

    One between two ports of an address never leaves the machine.
    """
    return dict(_found())


@contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """Give an object for a socket that stays somebody else's: a copy would go to a child that forks meanwhile."""
    # With this type, a default timeout of Python's does not make it a socket that never blocks, for its owner, too.
    one = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=number)
    try:
        yield one
    finally:
        one.detach()


def _found() -> Iterator[tuple[tuple[str, str], Connection]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with _borrowed(int(name)) as one:
                is_tcp = one.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL) == socket.IPPROTO_TCP
                if one.family not in (socket.AF_INET, socket.AF_INET6) or not is_tcp:
                    continue
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if len(info) < _KNOWN_BYTES or info[0] != _ESTABLISHED:
                    continue
                congestion = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                own, peer = one.getsockname(), one.getpeername()
        except OSError:  # another thread has closed it
            continue
        if own[0] == peer[0]:
            continue
        round_trip, resent, least, segments = (
            struct.unpack_from("=I", info, place)[0] for place in (_ROUND_TRIP, _RESENT, _LEAST_ROUND_TRIP, _SEGMENTS)
        )
        least = round_trip if least == _NOT_YET else least
        text = congestion.rstrip(b"\0").decode()
        yield (str(own), str(peer)), Connection(text, segments, resent, 1e-6 * round_trip, 1e-6 * least)


def line_between(before: Connections, after: Connections) -> Line:
    """Return what happened on the connections of `after` since `before`."""
    none = Connection("", 0, 0, 0.0, 0.0)
    seen = []
    for ends, now in after.items():
        then = before.get(ends, none)
        if now.segments > then.segments:
            own = (now.congestion,)
            sent = now.segments - then.segments
            seen.append(Line(own, sent, now.resent - then.resent, now.round_trip, now.least_round_trip))
    return together(seen)


def together(lines: Iterable[Line]) -> Line:
    """Return what several have seen, those left out that sent nothing."""
    seen = [line for line in lines if line.segments]
    if not seen:
        return Line()
    segments = sum(line.segments for line in seen)
    return Line(
        congestion=tuple(sorted({name for line in seen for name in line.congestion})),
        segments=segments,
        resent=sum(line.resent for line in seen),
        round_trip=sum(line.segments * line.round_trip for line in seen) / segments,
        least_round_trip=min(line.least_round_trip for line in seen),
    )
