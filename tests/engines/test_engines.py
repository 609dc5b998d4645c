# SPDX-License-Identifier: Apache-2.0
"""Each engine with two ranks: it trains, and what backend "bagua" carried for it is what its training needs."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torchrun import check_training, ended, output_of_ranks

pytestmark = pytest.mark.long

FOLDER = Path(__file__).parent
EXAMPLES = FOLDER.parents[1] / "examples"
PARAMETERS = 64 * 512 + 512 + 512 * 10 + 10

Carried = list[dict[str, list[int]]]


def _needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-engines")


def _run(folder: Path, script: Path, *arguments: str, python: str = sys.executable) -> tuple[str, Carried]:
    """Run two ranks; return their output and, for each, operation -> how often and with how many bytes."""
    text = output_of_ranks(FOLDER / "carried.py", str(folder), str(script), *arguments, python=python)
    carried = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    assert len(carried) == 2, text
    return text, carried


# Of two ranks: a byte for every parameter of four, and a few for the ranges.
CODED = (0.25, 0.27)


def test_fabric(tmp_path: Path) -> None:
    _needs("lightning")
    text, carried = _run(tmp_path, EXAMPLES / "with_fabric.py")
    check_training(text, CODED)
    # Three epochs of 50 steps.
    assert all(rank["all_reduce"] == [150, 150 * 4 * PARAMETERS] for rank in carried)


def test_transformers_logs_what_was_sent_beside_the_loss(tmp_path: Path) -> None:
    _needs("transformers")
    text, carried = _run(tmp_path, EXAMPLES / "with_transformers.py")
    check_training(text, CODED)
    sent = [float(figure) for figure in re.findall(r"'bagua/wire_bytes_per_step': '([\d.e+]+)'", text)]
    losses = len(re.findall(r"'loss': ", text))
    assert len(sent) == losses == 6
    gradients = carried[0]["all_reduce"][1] / 64
    assert all(0.24 < figure / gradients < 0.27 for figure in sent)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(tmp_path: Path, stage: int) -> None:
    _needs("deepspeed")
    text, carried = _run(tmp_path, EXAMPLES / "with_deepspeed.py", "--stage", str(stage))
    check_training(text)
    assert f"ZeRO stage {stage} over bagua" in text
    for rank in carried:
        # 100 steps: gradients of all parameters go in, whole or in parts, and weights come back.
        assert sum(size for _, size in rank.values()) > 100 * 4 * PARAMETERS, rank
        assert sum(count for count, _ in rank.values()) > 200, rank


def test_torchtitan_takes_a_group_that_was_made_first(tmp_path: Path) -> None:
    # An environment of its own, as it requires older versions of what the project pins: see scripts/engines.sh.
    python = Path(sys.prefix, "torchtitan", "bin", "python")
    installed = python.exists() and subprocess.run(
        [python, "-c", "from importlib import metadata; metadata.version('torchtitan')"], capture_output=True
    )
    if not installed or installed.returncode != 0:
        pytest.skip("torchtitan is not installed: make test-engines (it requires Python 3.11)")
    text, carried = _run(tmp_path, FOLDER / "torchtitan_fsdp.py", python=str(python))
    check_training(text)
    assert text.endswith("2 ranks over bagua\n"), text
    for rank in carried:
        # In each of 100 steps this rank's half of the weights is gathered twice, and its half of the gradients reduced.
        assert rank["_all_gather_base"][1] == 100 * 2 * 2 * PARAMETERS, rank
        assert rank["_reduce_scatter_base"][1] == 100 * 2 * PARAMETERS, rank
        # The norm of every step, and four means of losses.
        assert rank["all_reduce"][0] == 104, rank


def test_ray_starts_a_killed_worker_again() -> None:
    _needs("ray")
    done = ended(sys.executable, str(EXAMPLES / "with_ray.py"), "--die", RAY_USAGE_STATS_ENABLED="0")
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
