# SPDX-License-Identifier: Apache-2.0
"""What a training step costs on a line, by the rule that benchmarks/hosts/cost_model.py fits and tries.

    step = max(backward + processor, end of the line + processor / 2) + optimizer + delays * round trip / 2 + losses

Buckets of gradients are ready one after another during the backward, and the line is busy with them from the first one
on, at `efficiency` of its rate. The processor's work, a price for each parameter and message, is half hidden by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from bagua._message_bytes import Parameter

# Of a message on both sides, as in backend/cpu/collectives/agreed_line.cpp.
MESSAGE_SECONDS = 25e-6
# Of the processor's work, what the line does not hide where cores are free; of delays, what a busy line hides.
_BEHIND_THE_LINE = 0.5
_DELAYS_HIDDEN = 0.6
# Shares of a step's arithmetic.
FORWARD, OPTIMIZER = 1 / 3, 0.05
_BUCKET_BYTES = 4 << 20
# Of connections that yield, fitted by hand to benchmarks/results/grid_cubic.json and grid_loss.json. Each second of
# round trip makes a byte that the buffer before these lines does not hold take _YIELDED times longer.
# One connection has _CONNECTION_RATE at 50 ms and a loss of 0.1 %. The last packets of a step are sent again
# _LAST_PACKETS times, each a round trip and _MISSED_SECONDS after the last.
_YIELDED = 8.0
_BUFFER_SECONDS = 0.05
_CONNECTION_RATE = 10e6
_LAST_PACKETS = 3.0
_MISSED_SECONDS = 0.02
_PACKET_BITS = 1448 * 8
# More hosts than this never speak with each other all at once in an allreduce.
_MOST_AT_ONCE = 32
# The mean of coded messages is gathered in two rounds by more than these.
_MOST_IN_ONE_GATHER = 8


@dataclass(frozen=True)
class Line:
    """What lies between hosts: bits per second that a host can send, seconds of a round trip, part of packets lost."""

    hosts: int
    bits_per_second: float
    round_trip: float = 0.0
    # How many ranks wait for each other's core, where emulated hosts share those of one machine.
    ranks_per_core: float = 1.0
    loss: float = 0.0
    # Connections send less after each packet lost, as all congestion control but BBR has it.
    yields: bool = False
    # Losses bring BBR to bagua's connections. Gloo's keep the congestion control of the host.
    brings_bbr: bool = False

    def of_bagua(self) -> Line:
        """Return the line as bagua's connections find it."""
        return replace(self, yields=self.yields and not self.brings_bbr)

    def rate(self, bits: float, connections: int) -> float:
        """Return the bits per second that so many bits in one go get, over so many connections to a host."""
        if not self.yields:
            return self.bits_per_second
        if not self.loss:
            is_lossy = bits > _BUFFER_SECONDS * self.bits_per_second
            return self.bits_per_second / (1 + _YIELDED * self.round_trip * is_lossy)
        one = _CONNECTION_RATE * math.sqrt(0.001 / self.loss) * (0.05 / max(self.round_trip, 1e-3)) ** 0.4
        return 1 / math.hypot(1 / self.bits_per_second, 1 / (connections * one))

    def end_of_losses(self, bits: float) -> float:
        """Return the seconds for which a step waits for its last packets."""
        are_lost = 1 - math.exp(-self.loss * bits / _PACKET_BITS)
        return _LAST_PACKETS * (self.round_trip + _MISSED_SECONDS) * are_lost if self.yields else 0.0


@dataclass(frozen=True)
class Price:
    """What a way to communicate makes of a line.

    Attributes:
        efficiency: share of the line's rate that payload gets.
        delays: times that a byte crosses the line one way, which nothing hides.
        nanoseconds: of the processor for each parameter.
    """

    efficiency: float
    delays: float
    nanoseconds: float


def backward_shares(parameters: Sequence[Parameter]) -> list[float]:
    """Return, in the parameters' order, a backward's share of arithmetic before each gradient; the last comes first.

    It is in proportion to the parameter's size. That of an embedding takes none. Where there are convolutions they take
    all of it, and equal parts, as images shrink where channels grow.
    """
    is_convolutional = any(len(p.shape) > 3 for p in parameters)
    works = [
        float(len(p.shape) > 3) if is_convolutional else 0.0 if p.role == "embedding" else p.elements
        for p in parameters
    ]
    return [work / (sum(works) or 1.0) for work in works]


@dataclass(frozen=True)
class Step:
    """A step without communication: when each bucket is ready with its share of the bytes, its parts in seconds."""

    ready: Sequence[tuple[float, float]]
    backward_end: float
    optimizer: float
    elements: int

    @staticmethod
    def of(parameters: Sequence[Parameter], compute: float) -> Step:
        """Return that of a model which computes for `compute` seconds."""
        end = compute * (1 - OPTIMIZER)
        forward = compute * FORWARD
        total = sum(p.nbytes for p in parameters)
        ready, done, held = [], 0.0, 0
        for parameter, share in zip(reversed(parameters), reversed(backward_shares(parameters)), strict=True):
            done += share
            held += parameter.nbytes
            if held >= _BUCKET_BYTES:
                ready.append((forward + (end - forward) * done, held / total))
                held = 0
        if held:
            ready.append((end, held / total))
        return Step(ready, end, compute - end, sum(p.elements for p in parameters))

    def end_of_line(self, wire: float) -> float:
        """Return when a line that needs `wire` seconds for all buckets is through with them."""
        end = 0.0
        for time, share in self.ready:
            end = max(end, time) + wire * share
        return end


def _rounds(hosts: int) -> int:
    """Return the messages of a rank in two rounds between halves of halves."""
    levels = math.ceil(math.log2(hosts))
    return (1 << (levels + 1) // 2) + (1 << levels // 2) - 2


def _ring(hosts: int) -> int:
    return 2 * (hosts - 1)


def _in_parts(hosts: int) -> int:
    return _ring(hosts) if hosts <= _MOST_AT_ONCE else 2 * _rounds(hosts)


def _coded(hosts: int) -> int:
    return hosts - 1 + (_rounds(hosts) if hosts > _MOST_IN_ONE_GATHER else hosts - 1)


def _more_in_a_ring(hosts: int) -> int:
    return _ring(hosts) - _ring(2)


def _more_in_parts(hosts: int) -> int:
    return 0 if hosts <= _MOST_AT_ONCE else 2


def _neighbours(hosts: int) -> int:
    return min(hosts - 1, 2)


def _allreduced(hosts: int) -> float:
    return 2 * (hosts - 1) / hosts


@dataclass(frozen=True)
class Way:
    """How bytes go between so many hosts.

    Attributes:
        copies: how often a host sends each byte of a message.
        messages: in how many messages for a bucket.
        more_delays: how many more times than between two hosts messages wait for each other.
        connections: how many there may be to another host.
    """

    copies: Callable[[int], float] = _allreduced
    messages: Callable[[int], int] = _coded
    more_delays: Callable[[int], int] = lambda hosts: int(hosts > _MOST_IN_ONE_GATHER)
    is_after_the_step: bool = False
    connections: int = 32


WAYS = {
    "gloo": Way(messages=_ring, more_delays=_more_in_a_ring, connections=1),
    "gloo, fp16 hook": Way(messages=_ring, more_delays=_more_in_a_ring, connections=1),
    "gradient_allreduce": Way(messages=_in_parts, more_delays=_more_in_parts),
    "bytegrad": Way(),
    "quantized_allreduce, 4bit": Way(),
    "powersgd, rank 4": Way(messages=lambda hosts: 2 * _in_parts(hosts), more_delays=_more_in_parts),
    "qadam": Way(),
    "low_precision_decentralized": Way(_neighbours, _neighbours, lambda hosts: 0, is_after_the_step=True),
    "decentralized": Way(messages=_in_parts, more_delays=_more_in_parts),
}


def step_seconds(way: str, price: Price, step: Step, sent: float, line: Line, slowness: float = 1.0) -> float:
    """Return the seconds of a step in which a host's message is `sent` bytes before it goes to several.

    The processor takes `slowness` times as long as that of the prices, of which processor.py tells.
    """
    kind = WAYS[way]
    if not way.startswith("gloo"):
        line = line.of_bagua()
    bits = kind.copies(line.hosts) * sent * 8
    wire = bits / (price.efficiency * line.rate(bits, kind.connections))
    messages = kind.messages(line.hosts) * len(step.ready) * MESSAGE_SECONDS
    processor = (messages + 1e-9 * price.nanoseconds * step.elements) * line.ranks_per_core * slowness
    delay = (price.delays + kind.more_delays(line.hosts)) * line.round_trip / 2
    delay *= 1 - _DELAYS_HIDDEN * wire / (wire + delay)
    delay += line.end_of_losses(bits)
    behind = _BEHIND_THE_LINE if line.ranks_per_core <= 1 else 1.0
    if kind.is_after_the_step:
        return step.backward_end + step.optimizer + wire + behind * processor + delay
    end = step.end_of_line(wire) + behind * processor
    return max(step.backward_end + processor, end) + step.optimizer + delay


def fragment_seconds(line: Line, sent: float, plain: float) -> float:
    """Return the seconds of a fragment's exchange beside the training, as docs/rounds.md has it."""
    line = line.of_bagua()
    bits = _allreduced(line.hosts) * sent * 8
    wire = bits / line.rate(bits, Way.connections)
    window = min(line.bits_per_second * line.round_trip / 8, sent / line.hosts)
    slow_start = max(math.log2(max(window, 1) / 14e3) - 1, 0.0)
    coding = 1.6e-9 * plain if sent < plain else 0.0
    return wire + (2 + slow_start) * line.round_trip + line.end_of_losses(bits) + coding


def total_bytes(parameters: Iterable[Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)
