# SPDX-License-Identifier: Apache-2.0
"""Scripts as users start them: by themselves, and with torchrun on several hosts."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from made_up_images import write_made_up_images
from script_ranks import free_port

pytest.importorskip("lightning.pytorch", reason="Lightning is not installed: pip install lightning")

FOLDER = Path(__file__).parent
EXAMPLE = FOLDER.parents[1] / "examples" / "lightning_fashion_mnist.py"
# Two processes import torch and Lightning, on cores that others use too.
SECONDS = 300


def _environment(**changes: str) -> dict[str, str]:
    without_ranks = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return {**without_ranks, "OMP_NUM_THREADS": "1", **changes}


def _figures(folder: Path) -> list[dict[str, str]]:
    (path,) = folder.glob("**/metrics.csv")
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.long
def test_torchrun_on_two_hosts_with_pytorch_lightning(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--node-rank"]
    script = str(FOLDER / "train_script.py")
    nodes = [
        subprocess.Popen(
            [*torchrun, str(node), script, how, str(tmp_path)],
            env=_environment(BAGUA_HOST_ID=f"host-{node}"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        # The two ways to choose the strategy come to the same.
        for node, how in enumerate(("bagua_bytegrad", "instance"))
    ]
    outputs = [node.communicate(timeout=SECONDS)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    lines = [line for output in outputs for line in output.splitlines() if line.startswith('{"rank"')]
    first, second = sorted((json.loads(line) for line in lines), key=lambda result: result["rank"])
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["weights"] == second["weights"]
    steps, parameters = 8, 40 * 40 + 40
    stats = first["stats"]
    assert (stats["algorithm"], stats["steps"]) == ("bytegrad", steps)
    # Two ranks: each sends two messages of half the parameters, in 130 bytes for every 128 of them.
    message = -(-parameters // 2 // 128) * 130
    assert stats["wire_bytes_between_hosts"] == stats["wire_bytes"]
    # The guard looks at the first two steps at least.
    assert steps * 2 * message < stats["wire_bytes"] < steps * 2 * message + 4 * 700
    rows = _figures(tmp_path)
    figures = [row for row in rows if row["bagua/rounds"]]
    assert [row["step"] for row in rows if row["loss"]] == [row["step"] for row in figures]
    last = figures[-1]
    # An allreduce between two ranks sends each parameter once, in four bytes.
    saved = 4 * parameters * steps - stats["wire_bytes"]
    assert float(last["bagua/bytes_saved"]) == saved
    assert float(last["bagua/bytes_saved_per_step"]) == 4 * parameters - float(last["bagua/wire_bytes_per_step"])
    assert any(float(value) > 0 for name, value in last.items() if name.startswith("bagua/seconds_per_step/"))


@pytest.mark.long
def test_the_example_starts_its_own_ranks(tmp_path: Path) -> None:
    write_made_up_images(tmp_path)
    command = [sys.executable, str(EXAMPLE), "--data", str(tmp_path), "--logs", str(tmp_path / "logs"), "--batch", "4"]
    command += ["--epochs", "1", "--algorithm", "low_precision_decentralized", "--options", '{"hierarchical": false}']
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=SECONDS, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("logs/**/*.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    assert (checkpoint["global_step"], checkpoint["bagua"]["algorithm"]) == (4, "low_precision_decentralized")
    assert len(checkpoint["bagua"]["ranks"]) == 2
    assert any("accuracy" in row and row["accuracy"] for row in _figures(tmp_path / "logs"))
