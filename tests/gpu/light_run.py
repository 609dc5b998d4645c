# SPDX-License-Identifier: Apache-2.0
"""What the short run on a GPU is made of: stages of checks and programs, their limits, and their results.

A line of the results is `STAGE check ok|FAIL|SKIP milliseconds words`. Ranks are processes that are kept from check to
check; after a failure the next check finds new ones. A rank that hangs prints the stack of its threads and ends.
"""

import os
import re
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from check import Check, Wrong, ready
from devices import DEVICE, TIME_FACTOR
from ranks import RankFailure, RankPool

OK, FAIL, SKIP = "ok", "FAIL", "SKIP"
IS_GPU = DEVICE == "cuda"
FACTOR = 1.0 if IS_GPU else 6.0  # of limits: a machine without a GPU may have two busy cores
SPAWNED = True  # a rank that was forked by a process with torch might have no GPU
START_SECONDS = 60.0
END_SECONDS = 6.0  # of the whole limit, for the summary and the archive
LEAST_SECONDS = 2.0
MOST_WORDS = 450
MOST_LOG_BYTES = 512 << 10
MOST_FILE_BYTES = 12 << 20
NO_TIME = "no time was left"


def passed_if_it_ended_well(text: str, code: int | None) -> tuple[str, str]:
    last = " | ".join(text.strip().splitlines()[-2:])
    return (OK, last) if code == 0 else (FAIL, f"exit code {code}: {last}")


class Program(NamedTuple):
    """A command, and what its output and its exit code (None: ended at its limit) mean."""

    name: str
    command: Sequence[str]
    verdict: Callable[[str, int | None], tuple[str, str]] = passed_if_it_ended_well


class Stage(NamedTuple):
    name: str
    seconds: float  # at most
    checks: str = "$."  # a regular expression that finds their names
    size: int = 2  # of checks that allow it; else the number of ranks that they ask for
    hosts: str = ""  # of these ranks, a letter each
    programs: Callable[[Path], Sequence[Program]] = lambda folder: ()  # at the same time, beside the checks
    least: float = 0.0  # seconds that the stages before it have to leave
    backend: str = "bagua"
    # Environments to try until its first check passes. One that does is everybody's from then on; without any this is
    # the reason why stages that need it are left out.
    ways: Sequence[Mapping[str, str]] = ()
    needs: Sequence[str] = ("canary", "ours")
    is_alone: bool = False  # on the GPU


class Run:
    def __init__(self, checks: Mapping[str, Check], piece: int, limit: float, out: Path) -> None:
        self._checks, self._piece, self._out = checks, piece, out
        self.begin = time.monotonic()
        self.end = self.begin + limit
        self.folder = Path(tempfile.mkdtemp(prefix="gpu-light-"))
        self.lines: list[str] = []
        self.counts = {OK: 0, FAIL: 0, SKIP: 0}
        self.only: set[str] | None = None  # of "stage check", where not all are wanted
        self.suffix = ""
        self.environment: dict[str, str] = {}
        self._pools: dict[tuple[int, str, str], RankPool] = {}
        self._missing: dict[str, str] = {}
        out.mkdir(parents=True, exist_ok=True)
        (self.folder / "logs").mkdir()
        os.environ.update(BAGUA_TRACES=str(self.folder), PYTHONFAULTHANDLER="1", PYTHONUNBUFFERED="1")

    @property
    def has_failed(self) -> bool:
        """On a GPU what was skipped has not been shown."""
        return self.counts[FAIL] > 0 or (IS_GPU and self.counts[SKIP] > 0) or self.counts[OK] == 0

    def left(self) -> float:
        return self.end - END_SECONDS - time.monotonic()

    def note(self, stage: str, name: str, status: str, words: str, seconds: float) -> None:
        words = " ".join(words.split())
        words = words[:MOST_WORDS] + " ..." * (len(words) > MOST_WORDS)
        text = f"{stage}{self.suffix} {name} {status} {1e3 * seconds:.0f} {words}".rstrip()
        print(text, flush=True)
        self.lines.append(text)
        self.counts[status] += 1

    def stage(self, stage: Stage, later: Sequence[Stage], most: float = float("inf")) -> None:
        """Run a stage, whatever happens in it."""
        for_others = FACTOR * sum(one.least for one in later)
        seconds = min(stage.seconds * FACTOR, most, max(self.left() - for_others, stage.least * FACTOR), self.left())
        begin = time.monotonic()
        if stage.is_alone:
            self.close()
        try:
            self._stage(stage, begin + seconds)
        except Exception as error:
            self.note(stage.name, "stage", FAIL, f"{type(error).__name__}: {error}", time.monotonic() - begin)
        print(f"# {stage.name}{self.suffix}: {time.monotonic() - begin:.1f} s, {self.left():.0f} s left", flush=True)
        self.pack()

    def _stage(self, stage: Stage, end: float) -> None:
        programs = [one for one in stage.programs(self.folder) if self._is_wanted(stage, one.name)]
        started = [self._start(stage, program) for program in programs]
        checks = [check for name, check in self._checks.items() if re.search(stage.checks, name)]
        checks = [check for check in checks if self._is_wanted(stage, check.name)]
        try:
            if stage.ways and checks:
                self._find_a_way(stage, checks[0], end)
                checks = checks[1:]
            for check in checks:
                self._check(stage, check, end)
            for program, process in zip(programs, started, strict=True):
                self._await(stage, program, process, end)
        finally:
            for process in started:
                _kill(process)

    def _is_wanted(self, stage: Stage, name: str) -> bool:
        return self.only is None or not self.only.isdisjoint({f"{stage.name} {name}", f"{stage.name} stage"})

    # --- Checks ---

    def _find_a_way(self, stage: Stage, check: Check, end: float) -> None:
        before = self.environment
        for way in [{}, *stage.ways] if IS_GPU else [{}]:
            self.environment = {**before, **way}
            if self._check(stage, check, end, " ".join(f"{name}={value}" for name, value in way.items())):
                return
            self.close()
        self.environment = before
        self._missing[stage.name] = f"{stage.name} failed"

    def _check(self, stage: Stage, check: Check, end: float, way: str = "") -> bool:
        begin = time.monotonic()
        size = stage.size if stage.size in check.sizes else check.sizes[0]
        missing = [self._missing[need] for need in stage.needs if need in self._missing and size > 1]
        if check.cuda_only and not IS_GPU:
            missing.append("needs a GPU")
        elif end - begin < LEAST_SECONDS:
            missing.append(NO_TIME)
        if missing:
            self.note(stage.name, check.name, SKIP, missing[0], 0.0)
            return False
        status, words = self._outcome(stage, check, size, end)
        self.note(stage.name, check.name, status, f"{words} {way}", time.monotonic() - begin)
        return status == OK

    def _outcome(self, stage: Stage, check: Check, size: int, end: float) -> tuple[str, str]:
        def limit(seconds: float) -> float:
            return max(1.0, min(seconds * FACTOR, end - time.monotonic())) / TIME_FACTOR

        pool = self._pool(size, check.hosts or stage.hosts, check.group_timeout, stage.backend)
        try:
            if not pool.has_started:
                pool.run(ready, timeout=limit(START_SECONDS))
            said: list[Any] = pool.run(
                check.function, *check.arguments, timeout=limit(check.seconds), dying=check.dying
            )
        except RankFailure as failure:
            log = self.folder / "logs" / f"{stage.name}{self.suffix}-{check.name}.txt"
            log.write_text(str(failure))
            return FAIL, _in_short(str(failure))
        finally:
            if check.group_timeout:
                with suppress(RankFailure):  # what they were made for has been seen
                    pool.close(5.0)
        wrong = [words for words in said if isinstance(words, Wrong)]
        return (FAIL, wrong[0]) if wrong else (OK, next((str(words) for words in said if words), ""))

    def _pool(self, size: int, hosts: str, group_timeout: float, backend: str) -> RankPool:
        env: dict[str, Any] = dict(self.environment)
        if hosts:
            env["BAGUA_HOST_ID"] = list(hosts)
        if IS_GPU:
            env |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV"}  # how it connects is in the ranks' logs
        settings: dict[str, Any] = {"env": env, "share_gpu": True, "spawned": SPAWNED, "logs": self.folder / "logs"}
        if group_timeout:
            return RankPool(size, backend, group_timeout=group_timeout, **settings)
        key = (size, hosts, backend)
        if key not in self._pools:
            self._pools[key] = RankPool(size, backend, **settings)
        return self._pools[key]

    # --- Programs ---

    def _log(self, stage: Stage, program: Program) -> Path:
        return self.folder / "logs" / f"{stage.name}{self.suffix}-{program.name}.log"

    def _start(self, stage: Stage, program: Program) -> "subprocess.Popen[bytes] | OSError":
        with self._log(stage, program).open("w") as file:
            try:
                return subprocess.Popen(
                    program.command,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                return error

    def _await(self, stage: Stage, program: Program, process: Any, end: float) -> None:
        begin = time.monotonic()
        if isinstance(process, OSError):
            self.note(stage.name, program.name, FAIL, str(process), 0.0)
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(1.0, end - begin))
        code = process.poll()
        _kill(process)
        text = self._log(stage, program).read_text(errors="replace")
        status, words = program.verdict(text, code)
        self.note(stage.name, program.name, status, words, time.monotonic() - begin)

    # --- Results ---

    def close(self) -> None:
        """End all ranks, so that nothing of theirs is on the GPU any more."""
        for pool in self._pools.values():
            seconds = max(1.0, min(15.0 * FACTOR, self.left()))
            try:
                pool.close(seconds)
            except RankFailure as failure:
                self.note("ranks", f"end_of_{pool.world_size}", FAIL, _in_short(str(failure)), seconds)
        self._pools.clear()

    def pack(self) -> None:
        """Put everything that there is by now into one file, and the lines beside it."""
        (self.folder / "results.txt").write_text("".join(f"{line}\n" for line in self.lines))
        packed = self.folder.with_suffix(".tar.gz")
        with tarfile.open(packed, "w:gz", compresslevel=5) as archive:
            for file in sorted(self.folder.rglob("*")):
                if file.is_file() and file.name != "store":
                    if file.suffix in (".log", ".txt") and file.stat().st_size > MOST_LOG_BYTES:
                        content = file.read_bytes()
                        half = MOST_LOG_BYTES // 2
                        file.write_bytes(content[:half] + b"\n... cut ...\n" + content[-half:])
                    if file.stat().st_size <= MOST_FILE_BYTES:
                        archive.add(file, f"gpu_light_{self._piece}/{file.relative_to(self.folder)}")
        shutil.move(packed, self._out / f"gpu_light_{self._piece}.tar.gz")
        shutil.copyfile(self.folder / "results.txt", self._out / f"results_{self._piece}.txt")


def _kill(process: Any) -> None:
    if not isinstance(process, OSError):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _in_short(failure: str) -> str:
    """Where a rank hung, or the last line of what it raised."""
    said, *printed = failure.split("\n--- printed by rank")
    hung = re.search(r"Timeout \(.*", "".join(printed), re.DOTALL)
    if hung:
        frames = re.findall(r'File "[^"]*/([^/"]+)", line (\d+) in (\S+)', hung[0])
        return f"{said.splitlines()[0]} hung in " + ", ".join(
            f"{file}:{line} {name}" for file, line, name in frames[:4]
        )
    lines = [line for line in said.strip().splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Failure)\b", line)]
    return " ".join([lines[0], *(raised[-1:] or lines[-1:])])


def failed_before(results: str) -> tuple[set[str], dict[str, str]]:
    """Of the lines of an earlier run: "stage check" of what did not pass, and the environment that it needed."""
    failed: set[str] = set()
    environment: dict[str, str] = {}
    for line in results.splitlines():
        stage, name, status, _, *words = line.split(" ")
        failed.discard(f"{stage} {name}")  # a later line is of another way
        if status != OK:
            failed.add(f"{stage} {name}")
        elif stage in ("canary", "ours"):
            environment |= dict(word.split("=") for word in words if re.fullmatch(r"[A-Z_]+=\w+", word))
    return failed, environment
