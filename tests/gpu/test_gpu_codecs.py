# SPDX-License-Identifier: Apache-2.0
"""Every registered codec on CUDA against itself on the CPU: the contract tests in C++, which a GPU does not skip."""

import subprocess

import pytest
from codec_contract import codec_contract_program

pytestmark = [pytest.mark.any_device, pytest.mark.cuda_only]


def test_codecs_do_on_cuda_what_they_do_on_the_cpu() -> None:
    done = subprocess.run([codec_contract_program()], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-8000:]
    assert "SKIPPED" not in done.stdout
