# SPDX-License-Identifier: Apache-2.0
"""Measures the line between the hosts that torchrun has started this on."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from bagua._native import _C
from bagua._tensors_apart import gathered
from bagua.bench.cost_model import Line
from bagua.info.connections import connections, line_between, together

_BYTES = 16 << 20
_TIMES = 5


def measured() -> Line:
    """Return what lies between hosts, by the median of large all-reduces. Collective.

    On one host there is no line: its rate is 0.
    """
    dist.init_process_group("bagua")
    hosts = len(set(gathered(_C.local_host_id())))
    tensor = torch.ones(_BYTES // 4)
    dist.all_reduce(tensor)
    seconds = []
    for _ in range(_TIMES):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor.zero_())
        seconds.append(time.perf_counter() - begin)
    round_trip = together(gathered(line_between({}, connections()))).least_round_trip
    # Of an all-reduce the first byte waits for the line twice one way; the others follow it.
    busy = max(statistics.median(seconds) - round_trip, 1e-6)
    rate = 2 * (hosts - 1) / hosts * _BYTES * 8 / busy
    dist.destroy_process_group()
    return Line(hosts, rate, round_trip)
