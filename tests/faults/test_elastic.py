# SPDX-License-Identifier: Apache-2.0
"""torchrun restarts a job whose rank was killed: it ends with the weights of an undisturbed run."""

import itertools
from pathlib import Path
from typing import Any

import bagua
import pytest
import torch
from script_ranks import run_script
from trouble import selection

SCRIPT = Path(__file__).with_name("elastic_training.py")
RANKS = 2
LAYOUTS = ("one host", "a host each")
# Of the sum of squares that a model starts with, about 7.
LEARNED = 0.5


def _run(folder: Path, algorithm: str, disturbance: str, layout: str) -> list[dict[str, Any]]:
    """Return what each rank has ended with."""
    folder.mkdir()
    arguments = [str(folder), algorithm, disturbance, layout]
    if disturbance == "disturbed":
        torchrun = ["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=2", "--monitor-interval=0.1"]
        run_script("import torch.distributed.run as run; run.main()", 1, folder, *torchrun, str(SCRIPT), *arguments)
    else:
        run_script(SCRIPT.read_text(), RANKS, folder, *arguments, env={"TORCHELASTIC_RESTART_COUNT": "0"})
    processes = [file.name.removeprefix("process-") for file in folder.glob("process-*")]
    assert len(processes) == RANKS * (2 if disturbance == "disturbed" else 1)
    left = [path for process in processes for path in Path("/dev/shm").glob(f"bagua-{process}-*")]
    assert not left
    return [torch.load(folder / f"result-{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize(
    ("algorithm", "layout"),
    selection(itertools.product(bagua.available_algorithms(), LAYOUTS), [("low_precision_decentralized", "one host")]),
)
def test_a_killed_rank_costs_no_accuracy(tmp_path: Path, algorithm: str, layout: str) -> None:
    undisturbed = _run(tmp_path / "undisturbed", algorithm, "undisturbed", layout)
    disturbed = _run(tmp_path / "disturbed", algorithm, "disturbed", layout)
    for rank, (whole, continued) in enumerate(zip(undisturbed, disturbed, strict=True)):
        assert (whole["life"], whole["begin"]) == (1, 0)
        assert continued["life"] == 2
        assert continued["begin"] > 0
        if algorithm == "async":
            # When its rounds fall depends on time.
            assert max(whole["loss"], continued["loss"]) < LEARNED
            same = disturbed[0]["model"]
        else:
            same = whole["model"]
        for name, weight in same.items():
            assert torch.equal(weight, continued["model"][name]), f"rank {rank}: {name}"
