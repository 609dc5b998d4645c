# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks, or takes part as one that torchrun has started."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bagua.bench.collectives import COLLECTIVES
from bagua.bench.emulated_hosts import Network, NoEmulatedHosts, emulated_hosts
from bagua.bench.measure import Measurement, Result, environment
from bagua.bench.options import Settings, is_under_a_launcher, options_of
from bagua.bench.plot import write_plot
from bagua.bench.report import header, line, verdict, write_json

# On an emulated host, where nobody else listens.
_PORT = 29517


def run(settings: Settings) -> int:
    """Return the exit status: 0 where all results were right."""
    if is_under_a_launcher():
        dist.init_process_group("bagua")
        return _measure(settings)
    # Each rank would take every core for itself.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // settings.ranks, 1)))
    if settings.network is not None:
        return _run_on_emulated_hosts(settings, settings.network)
    with tempfile.TemporaryDirectory(prefix="bagua-bench-") as folder:
        try:
            mp.spawn(_rank, args=(settings, folder), nprocs=settings.ranks)  # type: ignore[no-untyped-call]
        except KeyboardInterrupt:
            return 130
        except mp.ProcessExitedException as error:
            return error.exit_code if error.exit_code > 0 else _failed(str(error))
        except mp.ProcessRaisedException as error:
            return _failed(str(error).strip())
    return 0


def _run_on_emulated_hosts(settings: Settings, network: Network) -> int:
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        with (
            tempfile.TemporaryDirectory(prefix="bagua-bench-") as folder,
            emulated_hosts(settings.hosts, network) as hosts,
        ):
            file = Path(folder, "settings")
            file.write_bytes(pickle.dumps(settings))
            meeting = f"tcp://{hosts[0].address}:{_PORT}"
            try:
                for rank in range(settings.ranks):
                    host = hosts[_host_of(rank, settings)]
                    command = [sys.executable, "-m", "bagua.bench.launch", str(file), str(rank), meeting]
                    ranks.append(subprocess.Popen(host.command(command), env=host.environment()))
                return _wait_for(ranks)
            finally:
                for process in ranks:
                    process.kill()
                    process.wait()
    except NoEmulatedHosts as error:
        return _failed(f"a line between the hosts needs emulated ones, which this machine cannot make: {error}")
    except KeyboardInterrupt:
        return 130


def _wait_for(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Return the exit status of the first that fails, or 0 when all have ended."""
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [code for code in codes if code]
        if failed or None not in codes:
            return abs(failed[0]) if failed else 0
        time.sleep(0.05)


def _be_rank(file: str, rank: str, meeting: str) -> int:
    """Be one of the ranks that were started on emulated hosts."""
    # Written by the process that has started this one.
    settings: Settings = pickle.loads(Path(file).read_bytes())
    dist.init_process_group("bagua", init_method=meeting, rank=int(rank), world_size=settings.ranks)
    return _measure(settings)


def _host_of(rank: int, settings: Settings) -> int:
    return rank * settings.hosts // settings.ranks


def _failed(message: str) -> int:
    print(f"bagua.bench: {message}", file=sys.stderr)
    return 1


def _rank(rank: int, settings: Settings, folder: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    if settings.hosts > 1:
        os.environ["BAGUA_HOST_ID"] = f"host-{_host_of(rank, settings)}"
    store = Path(folder, "store")
    dist.init_process_group("bagua", init_method=f"file://{store}", rank=rank, world_size=settings.ranks)
    status = _measure(settings)
    if status:
        sys.exit(status)


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
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(_be_rank(*sys.argv[1:]))
