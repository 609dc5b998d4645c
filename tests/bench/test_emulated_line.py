# SPDX-License-Identifier: Apache-2.0
"""The emulated line loses, delays and drops what it is told to, and TCP fares on it as on a real one."""

import math

from bagua.bench.emulated_hosts import Network
from traffic import datagrams, stream
from two_hosts import hosts_over

MEGABYTES = 1_000_000


def test_one_connection_with_cubic_is_slow_where_packets_are_lost() -> None:
    seconds = {}
    for loss in (0.0, 0.01):
        with hosts_over(Network(200e6, 0.02, loss, congestion=("cubic",))) as hosts:
            seen = stream(hosts, 2 * MEGABYTES)
        seconds[loss] = seen["seconds"]
        assert seen["congestion"] == "cubic"
        assert seen["least_round_trip_us"] >= 20_000
        # What is lost is sent again, and nothing else.
        assert loss / 3 <= seen["retransmitted"] / seen["segments"] <= 3 * loss
    # By the formula of Mathis et al. 1 % leaves it 7 Mbit/s.
    assert seconds[0.01] > 4 * seconds[0.0]


def test_a_buffer_that_is_short_overflows_and_one_without_end_does_not() -> None:
    resent = {}
    for buffer in (0.005, math.inf):
        with hosts_over(Network(100e6, 0.02, buffer=buffer, congestion=("cubic",))) as hosts:
            resent[buffer] = stream(hosts, 4 * MEGABYTES)["retransmitted"]
    assert resent[0.005] > 10
    assert resent[math.inf] == 0


def test_a_full_buffer_drops_what_comes_and_keeps_what_it_has() -> None:
    # 0.1 Mbit/s for 1 s: twelve packets of a thousand bytes wait, beside the one that is being sent. The line takes one
    # more for every 80 ms that a busy machine needs to send them all.
    with hosts_over(Network(0.1e6, buffer=1.0)) as hosts:
        came = datagrams(hosts, 40, 1000)
    numbers = [number for number, _ in came]
    assert numbers[:12] == list(range(12))
    assert 13 <= len(numbers) <= 20
    assert max(delay for _, delay in came) >= 0.9


def test_the_same_seed_loses_the_same_packets() -> None:
    def lost(seed: int) -> set[int]:
        with hosts_over(Network(loss=0.25, seed=seed)) as hosts:
            return set(range(200)) - {number for number, _ in datagrams(hosts, 200, 100)}

    once = lost(1)
    assert lost(1) == once
    assert lost(2) != once
    assert 25 <= len(once) <= 75


def test_jitter_delays_packets_and_keeps_their_order() -> None:
    with hosts_over(Network(round_trip=0.02, jitter=0.01)) as hosts:
        came = datagrams(hosts, 200, 100, pause=0.002)
    delays = [delay for _, delay in came]
    assert [number for number, _ in came] == list(range(200))
    assert 0.01 <= min(delays) < 0.013
    assert sorted(delays)[190] > 0.016


def test_packets_are_as_large_as_was_asked_for() -> None:
    segments = {}
    for packet in (1500, 9000):
        with hosts_over(Network(1e9, 0.002, packet=packet)) as hosts:
            segments[packet] = stream(hosts, MEGABYTES)["segments"]
    assert segments[1500] >= MEGABYTES / 1460
    assert MEGABYTES / 9000 <= segments[9000] < segments[1500] / 4


def test_another_congestion_control_is_only_for_those_who_may() -> None:
    for congestion, expected in ((("reno",), {"refused": "bbr"}), (("reno", "bbr"), {"congestion": "bbr"})):
        with hosts_over(Network(100e6, 0.002, congestion=congestion)) as hosts:
            assert stream(hosts, 1000)["congestion"] == "reno"
            seen = stream(hosts, 1000, "bbr")
        assert seen | expected == seen
