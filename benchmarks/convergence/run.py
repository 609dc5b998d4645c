# SPDX-License-Identifier: Apache-2.0
"""What `make convergence` runs: every algorithm beside plain DistributedDataParallel, on three tasks, by several seeds.

Keeps a record of each run in benchmarks/results/convergence.json and writes, from all that are there, the tables of
RESULTS.md and its figures. A run whose record is of the same settings is not trained again, whatever program
and processor made it (both are in the record): `--again REGEX` does so, after a change that matters. A run that is
trained gets a baseline of the same processor. The order of the runs is such that what is there at any time makes a
page. By hand:

    PYTHONPATH=examples OMP_NUM_THREADS=1 python benchmarks/convergence/run.py --only 'dictionary.*powersgd'
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import fashion_mnist
import report
import tasks
import torch
import torch.multiprocessing as mp
import training
from plan import all_runs
from runs import DICTIONARY, FASHION_MNIST, LICENCES, TORCHS_POWER_SGD, Run

HERE = Path(__file__).parent
ROOT = Path(__file__).resolve().parents[2]
LIMIT = 7200  # seconds that a run may take on a machine that has other things to do
ATTEMPTS = 5  # of torch's hook, which does not survive every run

Record = dict[str, Any]


def commit() -> str:
    """Which program makes the records."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def processor() -> str:
    """Its name. Another one adds in another order, and some hundred steps make a difference of that."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def execute(run: Run) -> Record:
    """Train on processes of its own; an error on any rank becomes the record's "error"."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "result.json")
        # Forked, since torch and the data are loaded already; this process has but one thread (OMP_NUM_THREADS=1).
        ranks = mp.start_processes(  # type: ignore[no-untyped-call]
            training.run_rank,
            (run, Path(folder, "rendezvous"), output),
            nprocs=run.ranks,
            join=False,
            start_method="fork",
        )
        assert ranks is not None  # join=False
        deadline = time.monotonic() + LIMIT
        try:
            while not ranks.join(timeout=max(1.0, deadline - time.monotonic())):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"still running after {LIMIT} s")
        except Exception:
            return {"error": traceback.format_exc()}
        finally:
            for process in ranks.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        result: Record = json.loads(output.read_text())
        return result


def execute_until_it_survives(run: Run) -> Record:
    """As `execute`; runs of torch's hook that failed are counted, and tried again."""
    failures: list[str] = []
    while True:
        record = execute(run)
        if run.row.algorithm != TORCHS_POWER_SGD:
            return record
        if "error" not in record or len(failures) + 1 == ATTEMPTS:
            return {**record, "failures": failures}
        failures.append(record["error"].strip().splitlines()[-1])


def read(path: Path) -> list[Record]:
    records: list[Record] = json.loads(path.read_text()) if path.is_file() else []
    return records


def write(records: list[Record], path: Path) -> None:
    """One line a run, so that differences can be read."""
    lines = ",\n".join(json.dumps(record) for record in sorted(records, key=run_and_processor))
    partial = path.with_suffix(".partial")
    partial.write_text(f"[\n{lines}\n]\n")
    partial.replace(path)


def run_and_processor(record: Record) -> tuple[str, str]:
    """What there is one record of; the processor of the oldest was not noted."""
    return record["run"], record.get("processor", "")


def settings_of(run: Run) -> Record:
    """As they are in a record."""
    settings: Record = json.loads(json.dumps(run.settings()))
    return settings


def records_of(run: Run, records: list[Record]) -> list[Record]:
    """Those that count: with the settings of today, and without an error."""
    settings = settings_of(run)
    mine = (record for record in records if record["run"] == run.name)
    return [record for record in mine if record["settings"] == settings and "error" not in record]


def train(run: Run, path: Path) -> Record:
    """Keep a record of the run. Those of other processors stay, where they count."""
    program = {"commit": commit(), "torch": torch.__version__, "processor": processor()}
    record = {"run": run.name, "settings": settings_of(run), **program, **execute_until_it_survives(run)}
    before = read(path)
    of_other_runs = [other for other in before if other["run"] != run.name]
    of_others = [other for other in records_of(run, before) if run_and_processor(other) != run_and_processor(record)]
    write([*of_other_runs, *of_others, record], path)
    return record


def train_all(runs: list[Run], path: Path, again: str) -> None:
    """Add the records of all runs that are not there yet, and of their baselines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    here = processor()
    for number, wanted in enumerate(runs, start=1):
        records = read(path)
        if records_of(wanted, records) and not (again and re.search(again, wanted.name)):
            continue
        # On Fashion-MNIST two processors differ by up to 1 %, more than 4 bits do from 32.
        has_baseline = any(record.get("processor") == here for record in records_of(wanted.baseline, records))
        for run in (wanted,) if wanted.row.algorithm is None or has_baseline else (wanted.baseline, wanted):
            start = time.monotonic()
            record = train(run, path)
            outcome = "FAILED" if "error" in record else f"{record['qualities'][run.task.qualities[0]]:.4f}"
            seconds = time.monotonic() - start
            print(f"[{number:>3}/{len(runs)}] {run.name:<70} {outcome:>8}  {seconds:.0f} s", flush=True)
            if "error" in record:
                print(record["error"], file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=ROOT / "benchmarks/results/convergence.json")
    parser.add_argument("--page", type=Path, default=HERE / "RESULTS.md", help="page that holds the tables")
    parser.add_argument("--figures", type=Path, default=HERE, help="folder of the figures")
    parser.add_argument(
        "--data", type=Path, default=fashion_mnist.DATA, help="folder with the four files of Fashion-MNIST"
    )
    parser.add_argument("--licences", type=Path, default=tasks.LICENCES, help="folder with Debian's common-licenses")
    parser.add_argument(
        "--dictionary",
        type=Path,
        default=ROOT / "build/convergence",
        help=f"folder with {tasks.DICTIONARY_FILE}, which is downloaded if it is not there",
    )
    parser.add_argument("--only", default="", help="train what this regular expression finds")
    parser.add_argument("--again", default="", help="train what this regular expression finds, record or not")
    parser.add_argument("--no-training", action="store_true", help="write the page from the records that are there")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    FASHION_MNIST.load(args.data)
    LICENCES.load(args.licences)
    DICTIONARY.load(args.dictionary)
    runs = [run for run in all_runs() if re.search(args.only, run.name)]
    if not args.no_training:
        train_all(runs, args.records, args.again)
    records = read(args.records)
    report.write(records, args.page, args.figures)
    print(f"{args.page} and its figures are written.")
    failed = {record["run"] for record in records if "error" in record}
    return 1 if any(run.name in failed for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
