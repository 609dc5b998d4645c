# SPDX-License-Identifier: Apache-2.0
"""Every registered codec on CUDA against itself on the CPU: the contract tests in C++, which a GPU does not skip."""

import subprocess
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.any_device, pytest.mark.cuda_only]

ROOT = Path(__file__).parents[2]


def test_codecs_do_on_cuda_what_they_do_on_the_cpu() -> None:
    minor = ".".join(torch.__version__.split(".")[:2])
    program = ROOT / "build" / f"torch{minor}" / "tests" / "contract" / "codec_cuda_contract_test"
    if not program.exists():
        pytest.skip("the C++ tests are not built: GoogleTest is not installed")
    done = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-8000:]
    assert "SKIPPED" not in done.stdout
