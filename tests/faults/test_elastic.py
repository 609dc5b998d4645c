# SPDX-License-Identifier: Apache-2.0
"""torchrun restarts a job whose rank was killed: it ends with the weights of an undisturbed run."""

import os
import subprocess
import sys
from pathlib import Path

import torch

SCRIPT = Path(__file__).with_name("elastic_training.py")


def _run(folder: Path, disturbance: str) -> tuple[dict[str, torch.Tensor], int]:
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2"]
    command += ["--standalone"]
    command += ["--monitor-interval=0.1", str(SCRIPT), str(folder), "bytegrad", disturbance]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    weights: dict[str, torch.Tensor] = torch.load(folder / "checkpoint.pt")["model"]
    return weights, int((folder / "lives.txt").read_text())


def test_a_killed_rank_costs_no_accuracy(tmp_path: Path) -> None:
    undisturbed, lives = _run(tmp_path / "undisturbed", "undisturbed")
    assert lives == 1
    disturbed, lives = _run(tmp_path / "disturbed", "disturbed")
    assert lives == 2
    assert undisturbed.keys() == disturbed.keys()
    for name, weight in undisturbed.items():
        assert torch.equal(weight, disturbed[name]), name
