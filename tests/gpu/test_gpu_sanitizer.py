# SPDX-License-Identifier: Apache-2.0
"""Our kernels under each tool of compute-sanitizer; on the CPU the walk runs without it."""

import itertools
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import bagua
import pytest
from codec_contract import codec_contract_program
from devices import DEVICE
from gpus import placement_here

pytestmark = pytest.mark.any_device

WALK = Path(__file__).with_name("kernel_walk.py")
SECONDS = 500
FOUND = 77
OF_ONE_RANK = 4 * 9 * 2 * 4 + 4 * 9 * 7
CASES = {1: OF_ONE_RANK, 2: OF_ONE_RANK + 4 * 9 * (1 + len(bagua.available_codecs()))}


def _sanitizer() -> str | None:
    """Of the machine's toolkit, or of the wheel nvidia-cuda-sanitizer-api."""
    places = [os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")]
    package = find_spec("nvidia")
    for folder in package.submodule_search_locations or [] if package else []:
        places += map(str, Path(folder).glob("cu*/bin"))
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *places]))


def _under(tool: str) -> list[str]:
    """The beginning of a command that runs under a tool of compute-sanitizer."""
    sanitizer = _sanitizer()
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed (CUDA toolkit, or pip install nvidia-cuda-sanitizer-api)")
    # Only kernels of ours: NCCL's wait for each other, and are not ours to check. Nor are calls of CUDA that fail: NCCL
    # makes some to learn what the device can do.
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--kernel-name", "kns=bagua"]
    if tool == "memcheck":
        options += ["--report-api-errors", "no"]
    return [sanitizer, *options]


def _walk(size: int, store: Path, prefix: list[str]) -> list[str]:
    """What each rank printed; every one has to end well."""
    placed = placement_here(size) if DEVICE == "cuda" else None
    processes = []
    for rank in range(size):
        device = f"cuda:{placed.gpus[rank]}" if placed else "cpu"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(placed.env[rank] if placed else {})}
        command = [*prefix, sys.executable, str(WALK), device, str(rank), str(size), str(store)]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        texts = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, text in zip(processes, texts, strict=True):
        assert process.returncode == 0, text[-8000:]
        assert f"walked {CASES[size]} cases" in text
    return texts


@pytest.mark.parametrize("size", CASES, ids="{}-ranks".format)
def test_the_walk_ends_well_by_itself(tmp_path: Path, size: int) -> None:
    _walk(size, tmp_path / "store", [])


# Two ranks' kernels read what NCCL has received, which initcheck takes for missing.
@pytest.mark.cuda_only
@pytest.mark.parametrize(
    ("tool", "size"),
    [*itertools.product(["memcheck", "racecheck", "synccheck"], CASES), ("initcheck", 1)],
)
def test_the_kernels_are_clean(tmp_path: Path, tool: str, size: int) -> None:
    for text in _walk(size, tmp_path / "store", _under(tool)):
        assert "0 errors" in text or "0 hazards" in text, text[-8000:]


@pytest.mark.cuda_only
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_the_kernels_of_every_codec_are_clean(tool: str) -> None:
    done = subprocess.run(
        [*_under(tool), codec_contract_program()], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-8000:]
    assert "0 errors" in text or "0 hazards" in text, text[-8000:]
