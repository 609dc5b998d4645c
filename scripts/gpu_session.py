# SPDX-License-Identifier: Apache-2.0
"""Everything that waits for a GPU, unattended: builds, tests, checks kernels and measures, a piece at a time.

    python3 scripts/gpu_session.py                        # all pieces that have no outcome yet
    python3 scripts/gpu_session.py --budget 540           # what fits into nine minutes; call it again for the rest
    python3 scripts/gpu_session.py --only 'codecs|bench'  # some pieces, whether they have run or not
    python3 scripts/gpu_session.py --device cpu           # do the pieces work? Tests and benchmarks on CPU tensors

A piece takes at most nine minutes; one that takes longer is ended, and has failed. Each leaves a log; tests leave a
report for JUnit, benchmarks their figures. session.json says how all pieces ended, and names each test that failed with
the first line of why. What is worth most comes first: kernels, DDP with hooks, figures, then the rest. Where no package
index answers nothing is fetched: the set-up borrows the torch that it finds. The script needs a Python only, since it
also makes the environment.

Exit codes: 0 all pieces have passed, 1 some failed, 2 there is no GPU, 3 the budget ended before the last piece.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = str(VENV / "bin" / "python")
PIECE_SECONDS = 540
SECONDS_TO_END = 15
LEAST_SECONDS = 30  # of a budget, for another piece to begin
NO_GPU = 2
BUDGET_ENDED = 3
SET_UP = "set-up"
ON_GPUS = "tests/gpu"
FIRST = ("codecs", "streams", "ddp")  # of tests/gpu; the others come by name
SANITIZERS = ["memcheck", "racecheck", "synccheck", "initcheck"]  # the longest of tests, so a piece each
HOOKS = re.compile(r"hook|compressed|powersgd|rounds|qadam|bytegrad|simulations|bucket|minmax|fuse")


@dataclass(frozen=True)
class Piece:
    """A command, and what it writes besides its log."""

    name: str
    command: list[str]
    report: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    piece: str
    outcome: str  # "passed", "failed" or "ended after ... s"
    exit_code: int | None
    seconds: float
    tests: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    @property
    def has_passed(self) -> bool:
        return self.outcome == "passed"


# --- What there is to do ---------------------------------------------------------------------------------------------


def pieces(device: str, output: Path) -> Iterator[Piece]:
    """In order. On the CPU the tests that `make test` runs there anyway are left out."""
    yield Piece(SET_UP, ["make", "build"], environment={"OMP_NUM_THREADS": ""})
    files = sorted((ROOT / ON_GPUS).glob("test_*.py"))
    files.sort(key=lambda file: [name not in file.name for name in FIRST])
    for file in files:
        tools = SANITIZERS if "sanitizer" in file.name and device == "cuda" else [""]
        yield from (_tests(file, device, output, tool) for tool in tools)
    elsewhere = _of_both_devices() if device == "cuda" else []
    yield from (_tests(file, device, output) for file in elsewhere if HOOKS.search(file.name))
    for part in ("codec", "hook", "collectives", "slow-network"):
        command = [PYTHON, "benchmarks/gpu/bench_gpu.py", part, "--device", device]
        yield Piece(f"bench-{part}", [*command, "--json", str(output / "gpu.json")])
    yield from (_tests(file, device, output) for file in elsewhere if not HOOKS.search(file.name))


def _of_both_devices() -> list[Path]:
    """Tests outside of tests/gpu that run on CUDA tensors too."""
    files = sorted((ROOT / "tests").glob("*/test_*.py"))
    return [
        file
        for file in files
        if re.search(r"mark\.any_device", file.read_text())
        and file.parent not in (ROOT / ON_GPUS, ROOT / "tests/support")
    ]


def _tests(file: Path, device: str, output: Path, chosen: str = "") -> Piece:
    """Of a file, or those whose names hold `chosen`."""
    name = "-".join([file.stem.removeprefix("test_"), *([chosen] if chosen else [])])
    report = output / f"{name}.xml"
    command = [PYTHON, "-m", "pytest", str(file.relative_to(ROOT)), "-k", chosen, "--junitxml", str(report)]
    return Piece(name, [*command, "-o", "junit_family=xunit2"], report, {"BAGUA_TEST_DEVICE": device})


# --- Doing it --------------------------------------------------------------------------------------------------------


def execute(piece: Piece, log: Path, seconds: float) -> Outcome:
    """Run a piece, all of whose processes end at its limit."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **piece.environment}
    environment = {name: value for name, value in environment.items() if value}
    if piece.report:
        piece.report.unlink(missing_ok=True)
    begin = time.monotonic()
    with log.open("w") as file:
        print("$", *piece.command, file=file, flush=True)
        process = subprocess.Popen(
            piece.command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
            process.send_signal(signal.SIGINT)  # pytest then reports on what it has done
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=SECONDS_TO_END)
        finally:
            _end_all_of(process)
    took = round(time.monotonic() - begin, 1)
    tests, failed = _read_report(piece.report, is_cut_short=code is None)
    outcome = f"ended after {seconds:.0f} s" if code is None else "passed" if code == 0 else "failed"
    return Outcome(piece.name, outcome, code, took, tests, failed)


def _end_all_of(process: subprocess.Popen[bytes]) -> None:
    """Its ranks too: a GPU that they hold would disturb the next piece."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_report(report: Path | None, *, is_cut_short: bool) -> tuple[dict[str, int], list[str]]:
    """How many tests passed, failed and were skipped; the names of those that failed, with the first line of why."""
    if report is None or not report.exists():
        return {}, []
    cases = list(ElementTree.parse(report).iter("testcase"))
    if is_cut_short:
        cases.pop()  # the one that was running has no result
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failed = []
    for case in cases:
        found = [element for kind in ("failure", "error") for element in case.iter(kind)]
        if found:
            why = (found[0].get("message") or "").strip().splitlines()
            failed.append(f"{case.get('classname')}::{case.get('name')}: {why[0] if why else ''}")
        counts["failed" if found else "skipped" if case.find("skipped") is not None else "passed"] += 1
    return counts, failed


def run(chosen: list[Piece], output: Path, budget: float, done: dict[str, Outcome], write: Callable[[], None]) -> bool:
    """Run pieces in turn while there is time; False if the budget ended first. Without a set-up nothing else runs."""
    deadline = time.monotonic() + budget
    for number, piece in enumerate(chosen, start=1):
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            return False
        print(f"[{number}/{len(chosen)}] {piece.name}", end=" ", flush=True)
        outcome = execute(piece, output / f"{piece.name}.log", min(PIECE_SECONDS, left))
        # What the budget cut short is tried again by the next call.
        if outcome.exit_code is not None or left >= PIECE_SECONDS:
            done[piece.name] = outcome
            write()
        counts = ", ".join(f"{count} {what}" for what, count in outcome.tests.items() if count)
        print(f"{outcome.outcome}, {outcome.seconds:.0f} s" + (f" ({counts})" if counts else ""), flush=True)
        for line in outcome.failed:
            print(f"    {line}")
        if piece.name == SET_UP and not outcome.has_passed:
            print(f"    see {output / SET_UP}.log")
            break
    return True


def sees_a_gpu() -> bool:
    """Asked of the driver, as there may be no torch yet."""
    try:
        return "GPU" in subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which nothing runs any more")
    parser.add_argument("--only", default="", help="the pieces whose names this regular expression finds, run or not")
    parser.add_argument("--output", type=Path, help="folder of logs and results (build/gpu-session, or -cpu)")
    parser.add_argument("--no-set-up", action="store_true", help="take the environment and the build as they are")
    parser.add_argument("--list", action="store_true", help="name the pieces and run none")
    args = parser.parse_args()
    output = (args.output or ROOT / "build" / ("gpu-session" if args.device == "cuda" else "gpu-session-cpu")).resolve()
    every = [piece for piece in pieces(args.device, output) if not (args.no_set_up and piece.name == SET_UP)]
    if args.list:
        print(*(piece.name for piece in every), sep="\n")
        return 0
    if args.device == "cuda" and not sees_a_gpu():
        print("GPU session: NOTHING WAS RUN, nvidia-smi names no GPU")
        return NO_GPU
    output.mkdir(parents=True, exist_ok=True)
    file = output / "session.json"
    content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    done = {name: Outcome(**outcome) for name, outcome in content.items()}
    # The environment may be of another machine, so that the set-up is looked at in every call.
    chosen = [
        piece
        for piece in every
        if piece.name == SET_UP or (re.search(args.only, piece.name) if args.only else piece.name not in done)
    ]

    def write() -> None:
        file.write_text(json.dumps({name: asdict(outcome) for name, outcome in done.items()}, indent=1) + "\n")

    is_complete = run(chosen, output, args.budget, done, write)
    failed = [name for name, outcome in done.items() if not outcome.has_passed]
    print(f"{len(done) - len(failed)} pieces passed, {len(failed)} failed" + "".join(f"\n  {name}" for name in failed))
    print(f"{file} has the outcomes, logs are beside it")
    return 1 if failed else 0 if is_complete else BUDGET_ENDED


if __name__ == "__main__":
    sys.exit(main())
