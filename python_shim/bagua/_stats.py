# SPDX-License-Identifier: Apache-2.0
"""What an algorithm has done on one rank, in figures."""

from __future__ import annotations

from typing import TypedDict

from bagua.info.connections import connections, line_between


class GuardStats(TypedDict):
    """What the guard of an algorithm that codes has seen since the registration; of gradients on all ranks together.

    Attributes:
        looks: samples of buckets that it has looked at.
        alarms: how often something was worse than the codec promises, several looks in a row.
        coding_loss: what coding loses of a message, in parts of its squared norm without outliers. This and the next
            two are the largest of what was seen last of each parameter.
        error_of_mean: how far the mean is from the true one, in parts of its squared norm.
        held_back: what error feedback holds, in squared norms of a message.
        raised: parameter -> by how many levels it is coded finer than asked for, with guard="adapt".
    """

    looks: int
    alarms: int
    coding_loss: float
    error_of_mean: float
    held_back: float
    raised: dict[str, int]


class LineStats(TypedDict):
    """What the kernel has seen of this process's TCP connections to other addresses, whoever has opened them.

    Attributes:
        connections: how many have sent data. Losses bring more of them where BBR is refused.
        congestion: the names of their congestion control; losses bring "bbr" where the system allows it.
        resent_share: the part of their packets that was sent again: an upper limit of what the line has lost.
        round_trip: seconds, with what waits in queues: the mean of the connections, each by its packets.
        least_round_trip: seconds, of the fastest packets of the last minutes.
    """

    connections: int
    congestion: list[str]
    resent_share: float
    round_trip: float
    least_round_trip: float


class Stats(TypedDict):
    """What `Handle.stats` returns: figures of one rank since the registration, or since `Handle.reset`.

    Attributes:
        algorithm: the name.
        steps: synchronised backwards.
        buckets: buckets of gradients in these steps.
        rounds: how often the ranks have communicated for a step.
        logical_bytes: bytes of gradients or weights that had to be communicated.
        wire_bytes: bytes sent to other ranks for them.
        wire_bytes_in_host: bytes of these that went to ranks of this host.
        wire_bytes_between_hosts: bytes of these that went to ranks of other hosts.
        state_bytes: bytes of memory that the algorithm keeps between steps now, such as residuals of error feedback.
        seconds: stage -> seconds of the communication threads, which work at the same time between hosts; on CUDA
            seconds of the device, of the stages that it has done by now (not of those in CUDA graphs). To ask waits
            for nothing.
        memory: what the algorithm holds beside the model now -> bytes. Of algorithms that hold weights of their own.
        reconnections: connections to other processes that have broken and were replaced, since this process began.
        line: losses, round trips and congestion control, since the connections were opened.
        guard: what the guard has seen. All zeros for algorithms without one.
        chosen: option -> the value that the algorithm has chosen where that was left to it ("auto").
    """

    algorithm: str
    steps: int
    buckets: int
    rounds: int
    logical_bytes: int
    wire_bytes: int
    wire_bytes_in_host: int
    wire_bytes_between_hosts: int
    state_bytes: int
    seconds: dict[str, float]
    memory: dict[str, int]
    reconnections: int
    line: LineStats
    guard: GuardStats
    chosen: dict[str, int]


class ShardedStats(Stats):
    """The same of a sharded model, whose bytes are those of gradients, with what `weights=` has done besides.

    Attributes:
        gathers: how often weights were gathered over the network. Nobody counts what FSDP2 gathers without `weights=`.
        gathered_bytes: bytes of this rank's own weights that went into these gathers, as they travelled. Each other
            rank gets them once.
    """

    gathers: int
    gathered_bytes: int


def line_stats() -> LineStats:
    """Return what the connections that there are have seen."""
    seen = connections()
    line = line_between({}, seen)
    return {
        "connections": sum(one.segments > 0 for one in seen.values()),
        "congestion": list(line.congestion),
        "resent_share": line.resent_share,
        "round_trip": line.round_trip,
        "least_round_trip": line.least_round_trip,
    }


def means_per_step(now: Stats, last: Stats | None = None) -> dict[str, float]:
    """Return the means over the steps between `last` (None: the beginning) and `now`; nothing where there are none.

    Returns:
        `logical_bytes_per_step`, `wire_bytes_per_step`, `wire_bytes_between_hosts_per_step` (bytes), and for each
        stage `seconds_per_step/<stage>` (seconds).
    """
    if last and now["steps"] < last["steps"]:
        last = None  # reset in between
    steps = now["steps"] - (last["steps"] if last else 0)
    if steps == 0:
        return {}
    names = {
        "logical_bytes_per_step": now["logical_bytes"] - (last["logical_bytes"] if last else 0),
        "wire_bytes_per_step": now["wire_bytes"] - (last["wire_bytes"] if last else 0),
        "wire_bytes_between_hosts_per_step": now["wire_bytes_between_hosts"]
        - (last["wire_bytes_between_hosts"] if last else 0),
    }
    means = {name: count / steps for name, count in names.items()}
    # Their names until the next release.
    means["bytes_sent_per_step"] = means["wire_bytes_per_step"]
    means["bytes_sent_between_hosts_per_step"] = means["wire_bytes_between_hosts_per_step"]
    before = last["seconds"] if last else {}
    for stage, seconds in now["seconds"].items():
        means[f"seconds_per_step/{stage}"] = (seconds - before.get(stage, 0.0)) / steps
    return means


def as_text(stats: Stats) -> str:
    """Return the figures in a few lines, for people."""
    share = f" ({stats['wire_bytes'] / stats['logical_bytes']:.0%})" if stats["logical_bytes"] else ""
    lines = [
        f"{stats['steps']:,} steps, {stats['buckets']:,} buckets, {stats['rounds']:,} rounds",
        f"{stats['logical_bytes']:,} bytes to communicate, {stats['wire_bytes']:,} bytes sent{share}: "
        f"{stats['wire_bytes_in_host']:,} inside the host, {stats['wire_bytes_between_hosts']:,} between hosts",
        f"{stats['state_bytes']:,} bytes kept between steps",
    ]
    lines += [f"{size:,} bytes of {what}" for what, size in stats["memory"].items()]
    if stats["reconnections"]:
        lines.append(f"{stats['reconnections']:,} connections that have broken and were replaced")
    line = stats["line"]
    if line["congestion"]:
        lines.append(
            f"{line['connections']} connections with {' and '.join(line['congestion'])}, {line['resent_share']:.2%} of "
            f"packets sent again, round trip {1e3 * line['round_trip']:.1f} ms"
        )
    if stats["chosen"]:
        lines.append("chosen: " + ", ".join(f"{option}={value}" for option, value in stats["chosen"].items()))
    if stats["seconds"]:
        lines.append("seconds: " + ", ".join(f"{stage} {time:.3f}" for stage, time in stats["seconds"].items()))
    return "\n".join(f"  {line}" for line in lines)
