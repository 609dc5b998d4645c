# SPDX-License-Identifier: Apache-2.0
"""What the CUDA parts do on a GPU that is there for fifteen minutes: the checks of tests/gpu, a line each.

    run.sh --piece 1 --limit 470                         everything once: collectives, algorithms, codecs, figures
    run.sh --piece 2 --limit 210 --again results_1.txt   what did not pass, again; lost ranks, CUDA graphs, FSDP2
    run.sh --piece 1 --device cpu                        do the checks themselves work? CPU tensors, Gloo for NCCL

Needs torch and the package, no network and no compiler; `make gpu-light` writes run.sh. Ranks share one GPU (see
support/gpus.py), which says nothing about the speed of a network. After each stage everything is packed into
gpu_light_PIECE.tar.gz in --out, with results_PIECE.txt beside it, so that a run that is cut off leaves what it had.

On a GPU a check that was skipped counts as failed. Exit codes: 0 all passed, 1 some did not, 2 there is no GPU.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

LIMITS = {1: 470.0, 2: 210.0}
SHARE_OF_AGAIN = 0.5


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--piece", type=int, choices=tuple(LIMITS), default=1)
    parser.add_argument("--limit", type=float, help="seconds for everything (470 or 210; on the CPU six times that)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build/gpu-light/results")))
    parser.add_argument("--again", type=Path, help="results of piece 1: what did not pass there comes first")
    parser.add_argument("--stages", default="", help="only those whose names this regular expression finds")
    parser.add_argument("--list", action="store_true", help="name stages and checks, and run none")
    return parser.parse_args()


def _sees_a_gpu() -> bool:
    smi = shutil.which("nvidia-smi")
    named = subprocess.run([smi, "-L"], capture_output=True, text=True, check=False).stdout if smi else ""
    return "GPU" in named or Path("/dev/nvidia0").exists()


def main() -> int:
    arguments = _arguments()
    os.environ["BAGUA_TEST_DEVICE"] = arguments.device
    if arguments.device == "cuda" and not arguments.list and not _sees_a_gpu():
        print("gpu-light: NOTHING WAS RUN, there is no GPU")
        return 2
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root / "tests" / name) for name in ("gpu", "support", "multiprocess", "soak")]
    import light_run
    from checks import CHECKS
    from light_stages import PIECES

    stages = [stage for stage in PIECES[arguments.piece] if re.search(arguments.stages, stage.name)]
    if arguments.list:
        for stage in stages:
            print(f"{stage.name} ({stage.seconds} s):", *(name for name in CHECKS if re.search(stage.checks, name)))
        return 0
    limit = arguments.limit or LIMITS[arguments.piece] * light_run.FACTOR
    run = light_run.Run(CHECKS, arguments.piece, limit, arguments.out)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if arguments.again:
            failed, run.environment = light_run.failed_before(arguments.again.read_text())
            run.suffix, end = "_again", time.monotonic() + SHARE_OF_AGAIN * limit
            for stage in PIECES[1]:
                run.only = {name for name in failed if name.startswith(f"{stage.name} ")}
                if run.only:
                    run.stage(stage, [], end - time.monotonic())
            run.only, run.suffix = None, ""
        for number, stage in enumerate(stages, start=1):
            run.stage(stage, stages[number:])
    finally:
        run.close()
        run.pack()
        shutil.rmtree(run.folder)
    lines = [line for line in run.lines if f" {light_run.FAIL} " in line]
    counts = ", ".join(f"{count} {status}" for status, count in run.counts.items())
    print(
        f"\ngpu-light, piece {arguments.piece} on {arguments.device}: {counts} in {time.monotonic() - run.begin:.0f} s"
    )
    print(*(f"  {line[:200]}" for line in lines), sep="\n")
    if light_run.IS_GPU and run.counts[light_run.SKIP]:
        print("FAILED: on a GPU a check that was skipped counts as failed")
    return int(run.has_failed)


if __name__ == "__main__":
    sys.exit(main())
