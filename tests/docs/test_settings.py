# SPDX-License-Identifier: Apache-2.0
"""The page of settings names every environment variable that C++ reads, and no other of ours; others are warned of."""

import re
from pathlib import Path

from bagua._settings import _KNOWN, _OF_DEVELOPERS
from script_ranks import run_script

ROOT = Path(__file__).parents[2]
VARIABLE = re.compile(r"\bBAGUA_[A-Z][A-Z_]*[A-Z]\b")


def test_every_variable_that_is_read_is_a_row_of_the_table_and_no_other() -> None:
    code = "\n".join(line.split("//")[0] for line in (ROOT / "backend" / "config.cpp").read_text().splitlines())
    rows = [line for line in (ROOT / "docs" / "settings.md").read_text().splitlines() if line.startswith("| `")]
    # The first cell of each row; the others may speak of anything.
    documented = {name for row in rows for name in VARIABLE.findall(row.split("|")[1])}
    assert documented == set(VARIABLE.findall(code))


_SCRIPT = """
import os
import torch.distributed as dist
if os.environ["RANK"] == "1":
    os.environ |= {"BAGUA_SOKET_IFNAME": "lo", "BAGUA_CUDA_ARCHS": "90", "BAGUA_NCCL_NET": "0", "BAGUA": "1"}
else:
    os.environ["BAGUA_NCCL_NET"] = "0"
dist.init_process_group("bagua")
dist.new_group()
dist.barrier()  # rank 0 serves the store
dist.destroy_process_group()
"""


def test_a_misspelt_variable_is_named_once_where_it_is_set_with_what_was_meant(tmp_path: Path) -> None:
    clean, misspelt = (end.output for end in run_script(_SCRIPT, 2, tmp_path))
    assert "no setting" not in clean
    (line,) = [line for line in misspelt.splitlines() if "no setting" in line]
    assert "rank 1: no setting is called BAGUA_SOKET_IFNAME" in line
    assert "did you mean 'BAGUA_SOCKET_IFNAME'?" in line


def test_what_builds_and_tests_read_is_known() -> None:
    files = [ROOT / "Makefile", *(ROOT / "scripts").glob("*.sh"), *(ROOT / "tests").rglob("*.py")]
    read = set(re.findall(r"(?:\$\{?|environ(?:\.get\(|\[)\")(BAGUA_[A-Z_]+)", "\n".join(f.read_text() for f in files)))
    assert {"BAGUA_STEPS", "BAGUA_TEST_DEVICE", "BAGUA_UNITY_BATCH"} < read
    assert [name for name in read - {*_KNOWN, "BAGUA_SOKET_IFNAME"} if not name.startswith(_OF_DEVELOPERS)] == []
