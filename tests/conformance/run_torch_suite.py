# SPDX-License-Identifier: Apache-2.0
"""Runs PyTorch's distributed tests against one backend and prints how each one ended.

python tests/conformance/run_torch_suite.py --backend gloo --world-size 2 --record    # what Gloo does, into expected/
python tests/conformance/run_torch_suite.py --backend bagua --world-size 2 -k gather  # a few tests, with their output
"""

import argparse
import json
import os
import sys
import tempfile
import time
import unittest
from collections import Counter
from typing import IO, Any, NamedTuple

from expectations import PASSED, SKIPPED, Expectation, expectation_path, write_expectations


class Outcome(NamedTuple):
    test: str
    outcome: str  # "pass", "skip" or "fail"
    reason: str
    seconds: float


def run_test(case: type[unittest.TestCase], name: str) -> Outcome:
    result = unittest.TestResult()
    start = time.monotonic()
    case(name).run(result)
    seconds = round(time.monotonic() - start, 2)
    problems = [text for _, text in result.errors + result.failures]
    if problems or result.unexpectedSuccesses:
        return Outcome(name, "fail", "\n".join(problems) or "expected to fail, but passed", seconds)
    if result.skipped:
        return Outcome(name, SKIPPED, " ".join(result.skipped[0][1].split()), seconds)
    return Outcome(name, PASSED, "", seconds)


def load_suite(backend: str, world_size: int, suite: str = "gloo") -> type[unittest.TestCase]:
    # Threads of the numerical libraries make forking unsafe, and more than one per rank is slower.
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(world_size), SUITE=suite)
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    # Every device counts from the start, so that a test that needs a GPU skips itself instead of failing halfway.
    if _visible_gpus() < world_size:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from torch_suite import TorchSuite

    return TorchSuite


def _visible_gpus() -> int:
    # Asks NVML: asking CUDA here would spoil the driver for forked ranks.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    return torch.cuda.device_count()


def altered(suite: Any) -> dict[str, type[unittest.TestCase]]:
    """The suite, broken on purpose in several ways."""

    class NoRanks(suite):  # type: ignore[misc]
        def start_ranks(self) -> None:
            pass

    class LastRankDies(suite):  # type: ignore[misc]
        @classmethod
        def _run(cls, rank: int, *args: Any, **kwargs: Any) -> None:
            try:
                super()._run(rank, *args, **kwargs)
            finally:
                if rank == 1:
                    os._exit(3)

    class LastRankRaises(suite):  # type: ignore[misc]
        def test_get_rank(self) -> None:
            if self.rank == 1:
                raise ValueError("planted")

    return {case.__name__: case for case in (NoRanks, LastRankDies, LastRankRaises)}


def serve(suite: type[unittest.TestCase], requests: IO[str], replies: IO[str]) -> None:
    """One test name per line in, of an altered suite behind its name; one JSON outcome per line out."""
    cases = {"": suite, **altered(suite)}
    for line in requests:
        kind, _, name = line.strip().rpartition(".")
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            # Ranks inherit these descriptors, so that what they print belongs to their test.
            os.dup2(output.fileno(), sys.stdout.fileno())
            os.dup2(output.fileno(), sys.stderr.fileno())
            outcome = run_test(cases[kind], name)
            sys.stdout.flush()
            sys.stderr.flush()
            output.seek(0)
            replies.write(json.dumps({**outcome._asdict(), "output": output.read()[-20000:]}) + "\n")
            replies.flush()


def test_names(case: type[unittest.TestCase], pattern: str) -> list[str]:
    return [name for name in unittest.defaultTestLoader.getTestCaseNames(case) if pattern in name]


def run_all(case: type[unittest.TestCase], pattern: str) -> list[Outcome]:
    outcomes = []
    for name in test_names(case, pattern):
        outcomes.append(run_test(case, name))
        print("{1:4}  {3:6.1f} s  {0}  {2}".format(*outcomes[-1]), flush=True)
    return outcomes


def _parse(arguments: list[str] | None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="bagua")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--suite", choices=("gloo", "nccl"), default="gloo", help="whose tests")
    parser.add_argument("--list", action="store_true", help="only print the names of the tests")
    parser.add_argument("-k", dest="pattern", default="", help="only tests whose name contains this")
    parser.add_argument("--record", action="store_true", help="write the outcomes of Gloo to expected/")
    parser.add_argument("--serve", action="store_true", help="read test names, write JSON: for test_torch_suite.py")
    options = parser.parse_args(arguments)
    if options.record and (options.backend != "gloo" or options.suite != "gloo" or options.pattern):
        parser.error("--record takes what stock Gloo does with all tests: --backend gloo, without -k")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as scratch:
        # torch leaves rendezvous files and folders of its own behind.
        os.environ["TMPDIR"] = tempfile.tempdir = scratch
        return run(options)


def run(options: Any) -> int:
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    case = load_suite(options.backend, options.world_size, options.suite)
    if options.list:
        print(*test_names(case, options.pattern), sep="\n")
        return 0
    if options.serve:
        serve(case, sys.stdin, replies)
        return 0
    outcomes = run_all(case, options.pattern)
    counts = Counter(outcome.outcome for outcome in outcomes)
    print(f"{options.backend}, {options.world_size} ranks: {dict(counts)}, {sum(o.seconds for o in outcomes):.0f} s")
    if options.record and not counts["fail"]:
        import torch

        path = expectation_path(torch.__version__, options.world_size)
        command = (
            f"python tests/conformance/run_torch_suite.py --backend gloo --world-size {options.world_size} --record"
        )
        write_expectations(path, {o.test: Expectation(o.outcome, o.reason) for o in outcomes}, command)
    return 1 if counts["fail"] else 0


if __name__ == "__main__":
    sys.exit(main())
