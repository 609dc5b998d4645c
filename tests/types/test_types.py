# SPDX-License-Identifier: Apache-2.0
"""Types as a user's mypy sees them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import bagua
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SECONDS = 500

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")


# What mypy knows of torch takes it a minute to find out; kept, and not among what `make lint` keeps with other options.
CACHE = ROOT / ".mypy_cache" / "users"


def _checked(folder: Path, *command: str) -> str:
    environment = {**os.environ, "MYPYPATH": str(ROOT / "python_shim"), "MYPY_CACHE_DIR": str(CACHE)}
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=SECONDS, cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_a_users_script_is_strictly_typed(tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch", reason="Lightning is not installed: pip install lightning")
    # As torch re-exports most of torch.distributed without saying so, a strict user has to allow it, too.
    strict = ["--strict", "--implicit-reexport", "--config-file=", "--follow-imports=silent"]
    _checked(tmp_path, "mypy", *strict, str(HERE / "user_script.py"))


@pytest.mark.long
def test_the_stub_of_the_compiled_module_agrees_with_it(tmp_path: Path) -> None:
    allowed = tmp_path / "allowed.txt"
    # What pybind11 adds to every class: attributes, a metaclass, and a constructor that raises where there is none.
    classes = r"bagua\._C\.(AsOnDevice|Executors|Hook|HookPlace|Options|ProcessGroupBagua)"
    added = [r"bagua\._C\..*\.__pybind11_module_local_.*__", r"bagua\._C\..*_pybind11_conduit_v1_", classes]
    allowed.write_text("\n".join([*added, r"bagua\._C\.(Executors|HookPlace)\.__init__", ""]))
    _checked(tmp_path, "mypy.stubtest", "--allowlist", str(allowed), "--ignore-unused-allowlist", "bagua._C")


def test_the_package_says_that_it_is_typed() -> None:
    assert bagua.__file__ is not None
    assert Path(bagua.__file__).with_name("py.typed").exists()
