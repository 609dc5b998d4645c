# SPDX-License-Identifier: Apache-2.0
"""What pip shows where the package cannot be built: one sentence. The build backend is asked as pip asks it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("scikit_build_core.build", reason="scikit-build-core is not installed")
ROOT = Path(__file__).parents[2]
METADATA = "prepare_metadata_for_build_wheel"
ASK = """
import importlib.metadata, sys
from scikit_build_core.build import {hook}
{fake}
{hook}({folder!r})
"""
WITHOUT_TORCH = """
found = importlib.metadata.version
def version(name):
    if name == "torch":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
importlib.metadata.version = version
"""


def _asked(folder: Path, fake: str, hook: str = METADATA, **changes: str) -> tuple[int, str]:
    code = ASK.format(hook=hook, fake=fake, folder=str(folder))
    env = {**os.environ, **changes}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr.strip()


@pytest.mark.parametrize(
    ("hook", "fake", "sentence"),
    [
        (METADATA, "sys.platform = 'darwin'", "it runs on Linux only, this is macOS (on Windows, WSL 2 is a Linux)"),
        (METADATA, "sys.platform = 'win32'", "it runs on Linux only, this is Windows (on Windows, WSL 2 is a Linux)"),
        (
            "build_sdist",
            WITHOUT_TORCH,
            "it is built against the torch that is installed, and there is none: type `pip install torch ",
        ),
        (
            METADATA,
            "importlib.metadata.version = lambda name: '2.10.1'",
            "it supports torch 2.11 to 2.15, installed is torch 2.10.1",
        ),
    ],
    ids=["macos", "windows", "no-torch", "old-torch"],
)
def test_a_build_that_cannot_succeed_ends_with_a_sentence(tmp_path: Path, hook: str, fake: str, sentence: str) -> None:
    status, error = _asked(tmp_path, fake, hook)
    assert status == 1
    assert error.startswith(f"bagua cannot be built here: {sentence}")
    assert len(error.splitlines()) == 1


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    status, error = _asked(tmp_path, "", PATH=str(tmp_path), CXX="")
    assert (status, error) == (
        1,
        "bagua cannot be built here: there is no C++ compiler (c++, g++, clang++): install g++ 11 or later, such as "
        "`apt install g++`",
    )
    status, error = _asked(tmp_path, "", CXX="no-such-compiler -O2")
    assert status == 1
    assert "there is no C++ compiler (no-such-compiler)" in error


def test_where_all_is_there_the_metadata_names_torch(tmp_path: Path) -> None:
    status, error = _asked(tmp_path, "")
    assert status == 0, error
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    assert "Requires-Dist: torch<2." in metadata.read_text() or "Requires-Dist: torch>=2." in metadata.read_text()
