# SPDX-License-Identifier: Apache-2.0
"""TORCH_DISTRIBUTED_DEBUG=DETAIL, set where a user sets it: torch puts a checking wrapper around every group."""

import os
import subprocess
import sys
from pathlib import Path

import bagua

SCRIPT = Path(__file__).with_name("detail_training.py")
RANKS = 2


def test_every_algorithm_trains_under_torch_s_checks_and_a_mismatch_is_one_clear_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    done = subprocess.run(
        [*command, "--monitor-interval=0.1", str(SCRIPT)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
            "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "trace_"),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for algorithm in bagua.available_algorithms():
        assert lines.count(f"trained {algorithm}") == RANKS
    # Torch's own, of either rank. Ours would come only if the call had gone on.
    mismatches = [line for line in lines if line.startswith("mismatch")]
    assert len(mismatches) == RANKS, done.stdout
    assert all("Detected mismatch between collectives" in line for line in mismatches), mismatches
    assert "do not make the same call" not in done.stdout + done.stderr
    assert not list(tmp_path.iterdir()), "no group has failed"
