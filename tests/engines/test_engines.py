# SPDX-License-Identifier: Apache-2.0
"""Each engine with two ranks: it trains, and what backend "bagua" carried for it is what its training needs."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

FOLDER = Path(__file__).parent
EXAMPLES = FOLDER.parents[1] / "examples"
# An agent and two ranks import torch, on cores that others use too; DeepSpeed compiles an extension when it is first
# imported.
SECONDS = 400
PARAMETERS = 64 * 512 + 512 + 512 * 10 + 10

Carried = list[dict[str, list[int]]]


def _needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-engines")


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def _run(folder: Path, script: Path, *arguments: str, python: str = sys.executable) -> tuple[str, Carried]:
    """Run two ranks; return their output and, for each, operation -> how often and with how many bytes."""
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    # Each rank is a host by itself, between which examples code.
    command += ["sh", "-c", 'BAGUA_HOST_ID=host-$RANK exec "$0" "$@"', python]
    done = subprocess.run(
        [*command, str(FOLDER / "carried.py"), str(folder), str(script), *arguments],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    carried = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    assert len(carried) == 2, done.stdout + done.stderr
    return done.stdout, carried


def _check_losses(text: str) -> None:
    losses = [float(loss) for loss in re.findall(r"loss'?:? '?(\d+\.\d+)", text)]
    assert losses[-1] < losses[0] / 2, text


def _check_compressed(text: str) -> None:
    figures = re.search(r"([\d,]+) bytes of gradients, ([\d,]+) bytes sent", text)
    assert figures is not None, text
    gradients, sent = (int(figure.replace(",", "")) for figure in figures.groups())
    # Two ranks: a byte for every parameter of four, and a few for the ranges.
    assert 0.25 <= sent / gradients < 0.27


def test_fabric(tmp_path: Path) -> None:
    _needs("lightning")
    text, carried = _run(tmp_path, EXAMPLES / "with_fabric.py")
    _check_losses(text)
    _check_compressed(text)
    # Three epochs of 50 steps.
    assert all(rank["all_reduce"] == [150, 150 * 4 * PARAMETERS] for rank in carried)


def test_transformers_logs_what_was_sent_beside_the_loss(tmp_path: Path) -> None:
    _needs("transformers")
    text, carried = _run(tmp_path, EXAMPLES / "with_transformers.py")
    _check_losses(text)
    _check_compressed(text)
    sent = [float(figure) for figure in re.findall(r"'bagua/wire_bytes_per_step': '([\d.e+]+)'", text)]
    losses = len(re.findall(r"'loss': ", text))
    assert len(sent) == losses == 6
    gradients = carried[0]["all_reduce"][1] / 64
    assert all(0.24 < figure / gradients < 0.27 for figure in sent)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(tmp_path: Path, stage: int) -> None:
    _needs("deepspeed")
    text, carried = _run(tmp_path, EXAMPLES / "with_deepspeed.py", "--stage", str(stage))
    _check_losses(text)
    assert f"ZeRO stage {stage} over bagua" in text
    for rank in carried:
        # 100 steps: gradients of all parameters go in, whole or in parts, and weights come back.
        assert sum(size for _, size in rank.values()) > 100 * 4 * PARAMETERS, rank
        assert sum(count for count, _ in rank.values()) > 200, rank


def test_accelerate_with_fsdp2(tmp_path: Path) -> None:
    _needs("accelerate")
    text, carried = _run(tmp_path, FOLDER / "accelerate_fsdp.py")
    _check_losses(text)
    assert "FSDPSequential over bagua" in text
    for rank in carried:
        gathered = sum(size for name, (_, size) in rank.items() if "gather" in name)
        reduced = sum(size for name, (_, size) in rank.items() if "reduce_scatter" in name)
        # In each of 150 steps this rank's half of the weights is gathered twice, and its half of the gradients reduced.
        assert gathered >= 150 * 2 * 2 * PARAMETERS, rank
        assert reduced >= 150 * 2 * PARAMETERS, rank


def test_torchtitan_takes_a_group_that_was_made_first(tmp_path: Path) -> None:
    # An environment of its own, as it requires older versions of what the project pins: see scripts/engines.sh.
    python = Path(sys.prefix, "torchtitan", "bin", "python")
    installed = python.exists() and subprocess.run(
        [python, "-c", "from importlib import metadata; metadata.version('torchtitan')"], capture_output=True
    )
    if not installed or installed.returncode != 0:
        pytest.skip("torchtitan is not installed: make test-engines (it requires Python 3.11)")
    text, carried = _run(tmp_path, FOLDER / "torchtitan_fsdp.py", python=str(python))
    _check_losses(text)
    assert text.endswith("2 ranks over bagua\n"), text
    for rank in carried:
        # In each of 100 steps this rank's half of the weights is gathered twice, and its half of the gradients reduced.
        assert rank["_all_gather_base"][1] == 100 * 2 * 2 * PARAMETERS, rank
        assert rank["_reduce_scatter_base"][1] == 100 * 2 * PARAMETERS, rank
        # The norm of every step, and four means of losses.
        assert rank["all_reduce"][0] == 104, rank


def test_ray_starts_a_killed_worker_again() -> None:
    _needs("ray")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "with_ray.py"), "--die"],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # The checkpoint of step 49 was the last; the worker dies before Ray has taken notice of it, or after.
    assert re.search(r"^step 99, begun at (34|50): loss 0\.", done.stdout, re.MULTILINE), done.stdout + done.stderr
    # Both workers are on one host, where nothing is coded.
    assert re.search(r"bytes of gradients, [\d,]+ bytes sent", done.stdout), done.stdout
    # What the other worker raised names the process that Ray had given this rank.
    killed = re.search(r"pid=(\d+)\) world_rank=1\b", done.stderr)
    assert killed is not None, done.stderr
    error = (
        rf"DistBackendError: bagua:reduce_bucket .* on rank 0 of 2, .*: the process of rank 1 \({killed[1]}\) has ended"
    )
    assert re.search(error, done.stderr), done.stderr
