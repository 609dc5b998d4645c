# SPDX-License-Identifier: Apache-2.0
"""Under torchrun: which ranks share a host, in what hosts differ, and whether they reach each other."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bagua import _build_info
from bagua.info.connections import Line, connections, line_between, together
from bagua.info.facts import advice, facts, table

# Facts that may differ between the hosts of a healthy job.
_OF_ONE_HOST = {"host id", "interfaces", "CPU tensors, in a host", "CPU tensors, between hosts"}
_TRIED_BYTES = 1 << 20


def is_under_a_launcher() -> bool:
    """Whether torchrun, or something like it, has started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def report(timeout: float, *, is_json: bool = False) -> int:
    """Print, on rank 0, what `bagua.info` says of one machine, and then what it takes all ranks to know.

    With `is_json` rank 0 prints the facts and notes of every rank as JSON, and what the trial says goes to stderr.

    Returns:
        1 on ranks that could not communicate, else 0.
    """
    limit = timedelta(seconds=timeout)
    # The launcher's store alone: it works also where the ranks do not reach each other's data ports.
    store, rank, ranks = next(dist.rendezvous("env://", timeout=limit))
    store.set_timeout(limit)
    own = facts()
    store.set(f"bagua.info/{rank}", json.dumps({"host": socket.gethostname(), "facts": own, "notes": [*advice(own)]}))
    if rank == 0:
        everyones = [json.loads(store.get(f"bagua.info/{other}")) for other in range(ranks)]
        said = [json.dumps(everyones, indent=1)] if is_json else [table(own), *summary(everyones)]
        print("\n".join(said), flush=True)
    with contextlib.redirect_stdout(sys.stderr if is_json else sys.stdout):
        return _try(dist.PrefixStore("bagua.info/group", store), rank, ranks, limit)


def hosts_of(host_ids: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host, hosts in the order of their lowest rank."""
    found: dict[str, list[int]] = {}
    for rank, host_id in enumerate(host_ids):
        found.setdefault(host_id, []).append(rank)
    return list(found.values())


def summary(everyones: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the hosts with their ranks, what differs between them, and everybody's notes."""
    maps = [entry["facts"] for entry in everyones]
    hosts = hosts_of([found["host id"] for found in maps])
    yield f"\n{len(maps)} ranks on {len(hosts)} host{'s' if len(hosts) > 1 else ''}"
    for number, ranks in enumerate(hosts):
        first = everyones[ranks[0]]
        carrier = maps[ranks[0]]["CPU tensors, between hosts"]
        yield f"host {number}  {first['host']}, ranks {', '.join(map(str, ranks))}; {carrier}"
    for name in sorted(set().union(*maps) - _OF_ONE_HOST):
        others = {found.get(name, "nothing"): rank for rank, found in reversed(list(enumerate(maps)))}
        if len(others) > 1:
            values = "; ".join(f"rank {rank} has {value}" for value, rank in sorted(others.items(), key=lambda i: i[1]))
            yield f"note: {name} is not the same everywhere: {values}"
    notes: dict[str, list[int]] = {}
    for rank, entry in enumerate(everyones):
        for note in entry["notes"]:
            notes.setdefault(note, []).append(rank)
    for note, ranks in notes.items():
        where = "" if len(ranks) == len(everyones) else f"ranks {', '.join(map(str, ranks))}: "
        yield f"note: {where}{note}"


def _try(store: dist.Store, rank: int, ranks: int, limit: timedelta) -> int:
    """Add a MiB up over all ranks, as the proof of the whole."""
    device = torch.device("cpu")
    if torch.cuda.is_available() and _build_info.CUDA_VERSION is not None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("bagua", store=store, rank=rank, world_size=ranks, timeout=limit)
        tensor = torch.ones(_TRIED_BYTES // 4, device=device)
        dist.all_reduce(tensor)
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        total = tensor[0].item()
        seconds = time.perf_counter() - begin
        if total != float(ranks) ** 2:
            raise RuntimeError(f"ones added up over {ranks} ranks, twice, gave {total}")
    except (RuntimeError, ValueError) as error:
        print(f"rank {rank}: the ranks cannot communicate: {error}", flush=True)
        return 1
    store.set(f"line/{rank}", json.dumps(asdict(line_between({}, connections()))))
    if rank == 0:
        print(
            f"all ranks reach each other: all_reduce of 1 MiB ({device.type}) took {1e3 * seconds:.2f} ms", flush=True
        )
        seen = together(Line(**json.loads(store.get(f"line/{other}"))) for other in range(ranks))
        if seen.segments:
            names, round_trip = " and ".join(seen.congestion), 1e3 * seen.least_round_trip
            resent = f"{100 * seen.resent_share:.2f} % of {seen.segments:,} packets sent again"
            print(f"line between hosts: {names}, round trip {round_trip:.2f} ms, {resent}", flush=True)
    dist.destroy_process_group()
    return 0
