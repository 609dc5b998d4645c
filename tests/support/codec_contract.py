# SPDX-License-Identifier: Apache-2.0
"""The C++ program that compares every registered codec on CUDA with itself on the CPU."""

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def codec_contract_program() -> str:
    minor = ".".join(torch.__version__.split(".")[:2])
    program = ROOT / "build" / f"torch{minor}" / "tests" / "contract" / "codec_cuda_contract_test"
    if not program.exists():
        pytest.skip("the C++ tests are not built: GoogleTest is not installed")
    return str(program)
