# SPDX-License-Identifier: Apache-2.0
"""What `make convergence` runs: every algorithm beside plain DistributedDataParallel, on two tasks, with several seeds.

Writes a JSON file per run into build/convergence and, from all of them, the tables of docs/convergence.md and the
figure beside it. What is there already, of the same settings and the same build, is not trained again. By hand:

    PYTHONPATH=examples OMP_NUM_THREADS=1 python benchmarks/convergence/run.py --only 'language.*bytegrad'
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import bagua
import fashion_mnist
import report
import tasks
import torch
import torch.multiprocessing as mp
import training
from plan import FASHION_MNIST, LANGUAGE_MODEL, Run, all_runs

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 600  # seconds that a run may take


def build_digest() -> str:
    """Names the program that makes a result: torch's version, every file of the package bagua, what trains here."""
    digest = hashlib.sha256(torch.__version__.encode())
    package = {
        path.relative_to(folder): path
        for folder in bagua.__path__
        for path in Path(folder).rglob("*")
        if path.suffix in (".py", ".so")
    }
    trainers = [Path(str(module.__file__)) for module in (fashion_mnist, tasks, training)]
    for path in [package[name] for name in sorted(package)] + trainers:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def finished(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The result kept at `path` if it is of these settings and no failure."""
    if not path.is_file():
        return None
    kept: dict[str, Any] = json.loads(path.read_text())
    return kept if kept["settings"] == settings and "error" not in kept else None


def execute(run: Run) -> dict[str, Any]:
    """Train on processes of its own; an error on any rank becomes the result's "error"."""
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
        result: dict[str, Any] = json.loads(output.read_text())
        return result


def train_all(runs: list[Run], folder: Path) -> dict[str, dict[str, Any]]:
    """Results by name of the run; trains those that are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    build = build_digest()
    results: dict[str, dict[str, Any]] = {}
    for number, run in enumerate(runs, start=1):
        settings = json.loads(json.dumps({**run.settings(), "build": build}))
        path = folder / f"{run.name}.json"
        result = finished(path, settings)
        note = "kept"
        if result is None:
            start = time.monotonic()
            result = {"settings": settings, **execute(run)}
            note = f"{time.monotonic() - start:.0f} s"
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(result))
            partial.replace(path)
        results[run.name] = result
        outcome = "FAILED" if "error" in result else f"{result['quality']:.4f}"
        print(f"[{number:>2}/{len(runs)}] {run.name:<60} {outcome:>8}  {note}", flush=True)
        if "error" in result:
            print(result["error"], file=sys.stderr, flush=True)
    return results


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "build/convergence", help="folder of the JSON files")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/convergence.md", help="page that holds the tables")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs/convergence.svg")
    parser.add_argument(
        "--data", type=Path, default=fashion_mnist.DATA, help="folder with the four files of Fashion-MNIST"
    )
    parser.add_argument("--texts", type=Path, default=tasks.TEXTS, help="folder with Debian's common-licenses")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="run what this regular expression finds, and write no page")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    FASHION_MNIST.load(args.data)
    LANGUAGE_MODEL.load(args.texts)
    runs = [run for run in all_runs(args.seeds) if re.search(args.only, run.name)]
    results = train_all(runs, args.results)
    if not args.only:
        report.write(results, args.seeds, args.page, args.figure)
        print(f"{args.page} and {args.figure} are written.")
    return 1 if any("error" in result for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
