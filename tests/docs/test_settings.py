# SPDX-License-Identifier: Apache-2.0
"""The page of settings names every environment variable that C++ reads, and no other of ours."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
VARIABLE = re.compile(r"\bBAGUA_[A-Z][A-Z_]*[A-Z]\b")


def test_every_variable_that_is_read_is_a_row_of_the_table_and_no_other() -> None:
    code = "\n".join(line.split("//")[0] for line in (ROOT / "backend" / "config.cpp").read_text().splitlines())
    rows = [line for line in (ROOT / "docs" / "settings.md").read_text().splitlines() if line.startswith("| `")]
    # The first cell of each row; the others may speak of anything.
    documented = {name for row in rows for name in VARIABLE.findall(row.split("|")[1])}
    assert documented == set(VARIABLE.findall(code))
