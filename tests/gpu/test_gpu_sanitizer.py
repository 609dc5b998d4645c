# SPDX-License-Identifier: Apache-2.0
"""Every codec on CUDA against itself on the CPU, and its kernels under each tool of compute-sanitizer."""

import subprocess

import bagua
import pytest
from sanitizer import BARRIERS_AND_FIRST_WRITES, MEMORY_AND_RACES, command, find_sanitizer, verdict

pytestmark = [pytest.mark.any_device, pytest.mark.cuda_only]


@pytest.mark.parametrize("codec", bagua.available_codecs())
@pytest.mark.parametrize("tool", ["", *MEMORY_AND_RACES, *BARRIERS_AND_FIRST_WRITES])
def test_kernels_do_what_the_cpu_does_and_are_clean(tool: str, codec: str) -> None:
    if tool and find_sanitizer() is None:
        pytest.skip("compute-sanitizer is not installed (CUDA toolkit, or pip install nvidia-cuda-sanitizer-api)")
    done = subprocess.run(command(codec, tool), capture_output=True, text=True, timeout=500, check=False)
    text = done.stdout + done.stderr
    assert verdict(text, done.returncode, tool)[0] == "ok", text[-8000:]
