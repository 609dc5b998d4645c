# SPDX-License-Identifier: Apache-2.0
"""Sum JUnit reports up in one line: `N passed, N failed, N skipped`. Fails when something failed or nothing passed."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter


def outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None or case.get("status") == "fail":
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def main(paths: list[str]) -> int:
    counts: Counter[str] = Counter()
    for path in paths:
        counts.update(outcome(case) for case in ElementTree.parse(path).iter("testcase"))
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
