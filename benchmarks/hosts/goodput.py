# SPDX-License-Identifier: Apache-2.0
"""What is left of a training whose processes die every so often. Needs root and iproute2.

python benchmarks/hosts/goodput.py --rates 1G 100M --minutes 10 --every 30

Four emulated hosts have a process each (goodput_rank.py), of which a random one is killed and started again. With
bagua.elastic, and under torchft's Manager over Gloo, the others go on. Else all start again from the last checkpoint,
as torchrun has it. Goodput is the share of the time that is in the weights: gradients that count, of four members, at
the pace of a step before the first death.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bagua.bench.emulated_hosts import Host, Network, emulated_hosts, rate_of, time_of

_RANKS = 4
_RANK = Path(__file__).with_name("goodput_rank.py")
_PORT = 29510
# Seconds before the first death, in which steps have their usual pace, and how long processes may take to start.
_SETTLING = 20.0
# As torchft's own page starts it: a quorum waits so long for members that are alive and late, and 5 s for the dead.
_LIGHTHOUSE = f"""
import threading
from torchft.coordination import LighthouseServer

server = LighthouseServer(bind="0.0.0.0:{_PORT}", min_replicas=1, join_timeout_ms=10000)
threading.Event().wait()
"""
_START = 120.0


class _Job:
    """Processes on the hosts, and what they have logged: a line of JSON a step."""

    def __init__(self, hosts: Sequence[Host], folder: Path, mode: str) -> None:
        self._hosts = hosts
        self._folder = folder
        self._mode = mode
        self._life = 0
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        meeting_place = ["-c", _LIGHTHOUSE] if mode == "torchft" else ["-m", "bagua.elastic", "--port", str(_PORT)]
        serve = hosts[0].command([sys.executable, *meeting_place])
        out = (self._folder / "meeting.txt").open("ab")
        self._store = subprocess.Popen(serve, env=hosts[0].environment(), stdout=out, stderr=out)

    def start(self, rank: int) -> None:
        arguments = [str(_RANK), self._mode, str(rank), str(_RANKS), self._hosts[0].address]
        arguments += [self._hosts[rank].address, str(_PORT), str(self._life), str(self._folder)]
        command = self._hosts[rank].command([sys.executable, *arguments])
        log = (self._folder / f"errors-{rank}.txt").open("ab")
        environment = {**self._hosts[rank].environment(), "OMP_NUM_THREADS": "1"}
        self._processes[rank] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def start_all(self) -> None:
        """Start all of a new life of the job."""
        self._life += 1
        for rank in range(_RANKS):
            self.start(rank)

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill the processes of hosts, as a machine that is taken away does."""
        for rank in ranks:
            self._processes[rank].kill()
            self._processes[rank].wait()

    def steps(self) -> list[dict[str, Any]]:
        """Return what ranks have logged, in the order of time."""
        lines = [line for file in self._folder.glob("steps-*") for line in file.read_text().splitlines()]
        return sorted((json.loads(line) for line in lines if line.endswith("}")), key=lambda line: float(line["at"]))

    def end(self) -> None:
        self.kill(range(_RANKS))
        self._store.kill()
        self._store.wait()


def measure(hosts: Sequence[Host], mode: str, seconds: float, every: float) -> dict[str, float]:
    """Return goodput, the seconds of a step, those from a death to the next step, and those of a step that heals."""
    with tempfile.TemporaryDirectory() as name:
        job = _Job(hosts, Path(name), mode)
        try:
            job.start_all()
            deadline = time.monotonic() + _START
            while not _are_all_there(job.steps()):
                if time.monotonic() > deadline:
                    raise RuntimeError((Path(name) / "errors-0.txt").read_text()[-2000:])
                time.sleep(0.5)
            settled = time.time()
            time.sleep(_SETTLING)
            begin = time.time()
            deaths = []
            # The same ones in each mode.
            victims = random.Random(0)
            for death in range(1, int(seconds / every) + 1):
                time.sleep(max(0.0, begin + death * every - every / 2 - time.time()))
                victim = victims.randrange(_RANKS)
                job.kill([victim] if mode != "checkpoints" else range(_RANKS))
                deaths.append(time.time())
                if mode != "checkpoints":
                    job.start(victim)
                else:
                    job.start_all()
            time.sleep(max(0.0, begin + seconds - time.time()))
            return _figures(mode, job.steps(), deaths, settled, begin, begin + seconds)
        finally:
            job.end()


def _are_all_there(lines: list[dict[str, Any]]) -> bool:
    """Whether all ranks have taken the last step, with weights that count."""
    last = max((line["step"] for line in lines), default=0)
    return sum(line["step"] == last and line["size"] == _RANKS and not line["is_healing"] for line in lines) == _RANKS


def _figures(
    mode: str, lines: list[dict[str, Any]], deaths: Sequence[float], settled: float, begin: float, end: float
) -> dict[str, float]:
    before = sorted({line["step"]: line["at"] for line in lines if settled <= line["at"] < begin}.values())
    step_seconds = statistics.median(later - sooner for sooner, later in itertools.pairwise(before))
    during = [line for line in lines if begin <= line["at"] < end]
    # A step that was taken twice, after a checkpoint, counts once.
    first = max(line["step"] for line in lines if line["at"] < begin)
    counted = len({(line["step"], line["rank"]) for line in during if line["step"] > first and not line["is_healing"]})
    # Where others go on, theirs is the next step; a step that was over before they noticed is not.
    after = [line["at"] for line in during if mode == "checkpoints" or line["size"] < _RANKS]
    gaps = [min((moment for moment in after if moment > death), default=end) - death for death in deaths]
    healing = [[line for line in during if line["rank"] == rank and line["is_healing"]] for rank in range(_RANKS)]
    pairs = [pair for own in healing for pair in itertools.pairwise(own)]
    healed = [later["at"] - sooner["at"] for sooner, later in pairs if later["step"] == sooner["step"] + 1]
    return {
        "goodput": counted / _RANKS * step_seconds / (end - begin),
        "step": step_seconds,
        "to the next step": statistics.median(gaps),
        "step that heals": statistics.median(healed) if healed else float("nan"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="*", default=["1G", "100M"], help="bits per second of a host (1G 100M)")
    parser.add_argument("--round-trip", default="1ms")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds from one death to the next (30)")
    parser.add_argument(
        "--modes", nargs="*", default=["elastic", "checkpoints"], help="torchft, too (from PyPI: torchft-nightly)"
    )
    args = parser.parse_args()
    print("| rate | how | goodput | step, s | from a death to the next step, s | a step while one heals, s |")
    print("|---|---|---|---|---|---|")
    for rate in args.rates:
        for mode in args.modes:
            with emulated_hosts(_RANKS, Network(rate_of(rate), time_of(args.round_trip))) as hosts:
                found = measure(hosts, mode, 60 * args.minutes, args.every)
            print(f"| {rate} | {mode} | {' | '.join(f'{value:.2f}' for value in found.values())} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
