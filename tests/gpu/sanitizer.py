# SPDX-License-Identifier: Apache-2.0
"""The C++ program that compares every codec on CUDA with itself on the CPU, alone and under compute-sanitizer."""

import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

from built import built

MEMORY_AND_RACES = ("memcheck", "racecheck")
BARRIERS_AND_FIRST_WRITES = ("synccheck", "initcheck")
# racecheck takes minutes over all of the tests.
_OF_TOOL = {"racecheck": ("CodesManyChunksLikeTheCpu", "MakesTheMeansOfTheCpu")}


def find_sanitizer() -> str | None:
    """Of the machine's toolkit, or of the wheel nvidia-cuda-sanitizer-api."""
    places = [os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")]
    package = find_spec("nvidia")
    for folder in package.submodule_search_locations or [] if package else []:
        places += map(str, Path(folder).glob("cu*/bin"))
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *places]))


def command(codec: str, tool: str = "") -> list[str]:
    """With a tool of compute-sanitizer, that is only asked for where there is one."""
    chosen = ":".join(f"*{test}*/{codec}*" for test in _OF_TOOL.get(tool, ("",)))
    program = [str(built("codec_cuda_contract_test")), f"--gtest_filter={chosen}"]
    if not tool:
        return program
    # Only kernels of ours, and no calls of CUDA that fail: libraries make some to learn what the device can do.
    options = ["--tool", tool, "--error-exitcode", "77", "--kernel-name", "kns=bagua"]
    if tool == "memcheck":
        options += ["--report-api-errors", "no"]
    return [find_sanitizer() or "compute-sanitizer", *options, *program]


def verdict(text: str, code: int | None, tool: str = "") -> tuple[str, str]:
    """ "ok", "FAIL" or "SKIP", and words, of what it printed and its exit code; None if it was ended at its limit."""
    done = len(re.findall(r"^\[ +OK +\] \S+", text, re.MULTILINE))
    summary = (re.findall(r"SUMMARY: (.*)", text) or [""])[-1]
    if "SKIPPED" in text:
        return "SKIP", "the program saw no GPU"
    if code == 0 and done and (not tool or re.search(r"\b0 (errors|hazards)", summary)):
        return "ok", f"{done} tests {summary}"
    how = "ended at its limit" if code is None else f"exit code {code}"
    begins = r"\[  FAILED  \].*|=+ (?:Invalid|Uninitialized|Barrier|Error|Warning|Potential|Race).*|.*: Failure"
    found = re.findall(begins, text) or text.strip().splitlines()[-3:]
    return "FAIL", f"{how} after {done} tests: {' | '.join(found[:3])}"
