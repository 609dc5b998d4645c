# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks, or takes part as one that torchrun has started."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from bagua.bench.collectives import COLLECTIVES
from bagua.bench.emulated_hosts import Host, NoEmulatedHosts, emulated_hosts
from bagua.bench.measure import Measurement, Result, environment
from bagua.bench.options import Settings, options_of
from bagua.bench.plot import write_plot
from bagua.bench.report import header, line, verdict, write_json
from bagua.info.ranks import is_under_a_launcher

# On an emulated host, where nobody else listens.
_PORT = 29517
# Of prctl(2).
_PR_SET_PDEATHSIG = 1


def run(settings: Settings) -> int:
    """Return the exit status: 0 where all results were right."""
    if is_under_a_launcher():
        dist.init_process_group("bagua")
        return _measure(settings)
    # Each rank would take every core for itself.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // settings.ranks, 1)))
    try:
        with tempfile.TemporaryDirectory(prefix="bagua-bench-") as folder:
            if settings.network is None:
                return _run_ranks(settings, folder, f"file://{folder}/store")
            with emulated_hosts(settings.hosts, settings.network) as hosts:
                return _run_ranks(settings, folder, f"tcp://{hosts[0].address}:{_PORT}", hosts)
    except NoEmulatedHosts as error:
        reason = f"a line between the hosts needs emulated ones, which this machine cannot make: {error}"
        print(f"bagua.bench: {reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run_ranks(settings: Settings, folder: str, meeting: str, hosts: Sequence[Host] = ()) -> int:
    """Run the ranks on emulated hosts, or, without any, on hosts that are so only by name."""
    file = Path(folder, "settings")
    file.write_bytes(pickle.dumps(settings))
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(settings.ranks):
            number = rank * settings.hosts // settings.ranks
            command = [sys.executable, "-m", "bagua.bench.launch", str(file), str(rank), meeting, str(os.getpid())]
            variables = {**os.environ, "LOCAL_RANK": str(rank)}
            if hosts:
                command, variables = hosts[number].command(command), hosts[number].environment()
            elif settings.hosts > 1:
                variables["BAGUA_HOST_ID"] = f"host-{number}"
            ranks.append(subprocess.Popen(command, env=variables))
        return _wait_for(ranks)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _wait_for(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Return the exit status of the first that fails, or 0 when all have ended."""
    while True:
        codes = [rank.poll() for rank in ranks]
        for rank, code in enumerate(codes):
            if code is not None and code < 0:
                print(f"bagua.bench: rank {rank} was ended by {signal.Signals(-code).name}", file=sys.stderr)
            if code:
                return max(code, 1)
        if None not in codes:
            return 0
        time.sleep(0.05)


def _be_rank(file: str, rank: str, meeting: str, parent: str) -> int:
    """Be one of the ranks, which end with the process that has started them."""
    # An interrupt from the terminal reaches that process, too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return 1
    # Written by that process.
    settings: Settings = pickle.loads(Path(file).read_bytes())
    dist.init_process_group("bagua", init_method=meeting, rank=int(rank), world_size=settings.ranks)
    return _measure(settings)


def _measure(settings: Settings) -> int:
    device = torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    options = settings.options
    facts = environment(settings, device)
    # On a single host hierarchical algorithms would compress nothing.
    flat = {"hierarchical": False}
    if facts["hosts"] == 1 and any(options_of(test, flat) for test in settings.tests if test not in COLLECTIVES):
        options = facts["options"] = {**flat, **options}
    measurement = Measurement(replace(settings, options=options), device)
    is_first = dist.get_rank() == 0
    if is_first:
        print(header(facts), flush=True)
    results: list[Result] = []
    for result in measurement.results():
        results.append(result)
        if is_first:
            print(line(result), flush=True)
    wrong = sum(bool(result.check) for result in results)
    if is_first:
        for sentence in verdict(facts, results):
            print(f"# {sentence}", flush=True)
        if settings.json:
            write_json(settings.json, facts, results)
        if settings.plot:
            write_plot(settings.plot, facts, results)
        if wrong:
            print(f"{wrong} of {len(results)} results are WRONG", file=sys.stderr)
    dist.destroy_process_group()
    # The first rank says so when it has written all; others end before it.
    return 1 if wrong and is_first else 0


if __name__ == "__main__":
    sys.exit(_be_rank(*sys.argv[1:]))
