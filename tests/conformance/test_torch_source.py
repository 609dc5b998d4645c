# SPDX-License-Identifier: Apache-2.0
"""Tests in PyTorch's source that its wheel has not: what passes there with Gloo passes with "bagua" in its place.

    git clone --depth 1 --branch v2.15.0 <the repository pytorch/pytorch> ~/pytorch
    TORCH_SOURCE=~/pytorch python -m pytest tests/conformance/test_torch_source.py

The checkout is to be of the version that is installed. Each file runs twice; what Gloo does is expected. Without
TORCH_SOURCE all are skipped; a checkout of another version, or a file that it does not have, is a failure.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

_FOLDER = Path(__file__).parent
_VERSION = torch.__version__.split("+")[0]
# Files that came with a later version than the first one here.
_FROM = {"test_c10d_fault_tolerance.py": (2, 15)}
_LISTED = [line for line in (_FOLDER / "torch_source_files.txt").read_text().splitlines() if not line.startswith("#")]
_FILES = [name for name in _LISTED if tuple(map(int, _VERSION.split(".")[:2])) >= _FROM.get(name, (0, 0))]
# What a test asks that is true of Gloo by definition, so that nothing in its place can pass.
_ASKS_FOR_GLOO_ITSELF = {"test_init_process_group_for_all_backends": 'a group asked for as "gloo" calls itself "gloo"'}
_SOURCE = os.environ.get("TORCH_SOURCE", "")
# Of one file: some have hundreds of tests that start ranks.
_SECONDS = 3600.0

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3 * _SECONDS),
    pytest.mark.skipif(
        not _SOURCE,
        reason=f"TORCH_SOURCE is not set: let it name a checkout of pytorch/pytorch at tag v{_VERSION}",
    ),
]


def _file_of(source: Path, name: str) -> Path:
    """A file of the list in the checkout; an AssertionError says what is wrong with the checkout, and what to do."""
    advice = f"let TORCH_SOURCE name a checkout of pytorch/pytorch at tag v{_VERSION}"
    folder, stated = source / "test" / "distributed", source / "version.txt"
    for needed in (folder, stated):
        assert needed.exists(), f"TORCH_SOURCE={source} has no {needed.relative_to(source)}: {advice}"
    version = stated.read_text().strip()
    assert version.split(".")[:2] == _VERSION.split(".")[:2], (
        f"TORCH_SOURCE={source} is PyTorch {version}, {_VERSION} is installed: {advice}"
    )
    file = folder / name
    assert file.is_file(), (
        f"PyTorch {version} has no test/distributed/{name}: was it renamed? Correct torch_source_files.txt"
    )
    return file


def _results(file: Path, backend: str, folder: Path) -> tuple[dict[str, str], bool]:
    """How each test of a file ends, by its name, with `backend` where it asks for Gloo; and whether it asks at all."""
    report, groups = folder / f"{backend}.xml", folder / backend
    groups.mkdir()
    path = os.pathsep.join(filter(None, [str(_FOLDER / "in_gloos_place"), os.environ.get("PYTHONPATH", "")]))
    environment = {"PYTHONPATH": path, "BAGUA_TEST_BACKEND": backend, "BAGUA_TEST_GROUPS": str(groups)}
    command = [sys.executable, "-m", "pytest", file.name, "--quiet", "--junitxml", str(report)]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=file.parent,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert report.exists(), done.stdout + done.stderr
    results = {}
    for case in ET.parse(report).iter("testcase"):
        problems = [child for child in case if child.tag in ("failure", "error", "skipped")]
        name = f"{case.get('classname')}.{case.get('name')}"
        results[name] = f"{problems[0].tag}: {problems[0].get('message')}" if problems else "passed"
    processes = {file.name for file in groups.iterdir()}
    assert "loaded" in processes, f"{_FOLDER / 'in_gloos_place'} was not loaded: is there another sitecustomize?"
    return results, processes != {"loaded"}


@pytest.mark.parametrize("name", _FILES)
def test_what_passes_with_gloo_passes_with_bagua(name: str, tmp_path: Path) -> None:
    file = _file_of(Path(_SOURCE).expanduser(), name)
    gloo, makes_groups = _results(file, "gloo", tmp_path)
    passed = {
        test for test, result in gloo.items() if result == "passed" if test.split(".")[-1] not in _ASKS_FOR_GLOO_ITSELF
    }
    if all(result.startswith("skipped") for result in gloo.values()):
        pytest.skip(f"torch skips all {len(gloo)} tests with Gloo on CPUs")
    assert passed, f"none of the {len(gloo)} tests passes with Gloo: is the checkout of another version? {gloo}"
    if not makes_groups:
        pytest.skip(f"none of the {len(gloo)} tests makes a group of Gloo: their ranks are threads, or a fake")
    ours, has_made_groups = _results(file, "bagua", tmp_path)
    assert {test: ours.get(test, "missing") for test in passed} == dict.fromkeys(passed, "passed")
    assert has_made_groups, "no process has made a group of bagua"
