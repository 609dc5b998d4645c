# SPDX-License-Identifier: Apache-2.0
"""What `make release` publishes besides wheels: sources that are of no torch, and notes that CHANGELOG.md has."""

import runpy
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTES = runpy.run_path(str(ROOT / "scripts" / "release_notes.py"))
WHEEL = "bagua-0.1.0+torch2.15-cp311-cp311-manylinux_2_35_x86_64.whl"


def test_sources_have_a_version_without_a_torch_and_take_any_that_is_supported(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core.build", reason="scikit-build-core is not installed")
    code = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=120)
    (sdist,) = tmp_path.iterdir()
    version = NOTES["BASE_VERSION"]
    assert sdist.name == f"bagua-{version}.tar.gz"
    with tarfile.open(sdist) as archive:
        file = archive.extractfile(f"bagua-{version}/PKG-INFO")
        assert file is not None
        facts = file.read().decode().split("\n\n")[0].splitlines()
        assert {f"bagua-{version}/{name}" for name in ("CMakeLists.txt", "tests/smoke.py")} < set(archive.getnames())
    assert {f"Version: {version}", "Dynamic: Requires-Dist", "Requires-Dist: torch<2.16,>=2.11"} <= set(facts)


def test_notes_are_the_part_of_the_version_and_its_wheels() -> None:
    changes = "# Changes\n\n## 0.2.1, 3 May\n\nOne.\n\n## 0.2, 1 May\n\nTwo.\n"
    assert NOTES["section"](changes, "0.2.1") == "One."
    assert NOTES["section"](changes, "0.2.0") == "Two."
    with pytest.raises(ValueError, match=r"says nothing of 0\.2\.2"):
        NOTES["section"](changes, "0.2.2")
    table = NOTES["files"]([WHEEL])
    assert f"| 2.15 | 3.11 | x86_64 | `{WHEEL}` |" in table
    assert "glibc 2.35" in table
    with pytest.raises(ValueError, match="is not named"):
        NOTES["files"](["bagua-0.1.0+torch2.15-cp311-cp311-linux_x86_64.whl"])


def test_the_version_of_today_has_notes() -> None:
    assert NOTES["section"]((ROOT / "CHANGELOG.md").read_text(), NOTES["BASE_VERSION"])
