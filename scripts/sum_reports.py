# SPDX-License-Identifier: Apache-2.0
"""Sum JUnit reports up in one line: `N passed, N failed, N skipped`. Fails when something failed or nothing passed.

sum_reports.py [--times] FOLDER...    with --times, where the time of each folder's run went comes first
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import NamedTuple

_SLOWEST = 10


class Case(NamedTuple):
    name: str
    folder: str
    outcome: str
    seconds: float


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None or case.get("status") == "fail":
        return "failed"
    skipped = case.find("skipped")
    if skipped is not None and skipped.get("message") == "Unable to find executable":
        return "failed"  # CTest's name for it is notrun, as for a test that is switched off.
    is_left_out = skipped is not None or case.get("status") in ("notrun", "disabled")
    return "skipped" if is_left_out else "passed"


def _case(case: ElementTree.Element) -> Case:
    suite = case.get("classname", "")
    folder = "/".join(suite.split(".")[:2]) if suite.startswith("tests.") else "C++ units"
    return Case(f"{suite}::{case.get('name')}", folder, _outcome(case), float(case.get("time", 0)))


def _cases(path: Path) -> list[Case]:
    return [_case(case) for case in ElementTree.parse(path).iter("testcase")]


def read(folder: Path) -> list[Case]:
    """All cases of a run: those of pytest, and those of CTest with GoogleTest's own report in their place."""
    cases = []
    for path in sorted(folder.glob("*.xml")):
        for case in _cases(path):
            # A test executable is one case of CTest. What it says of itself counts, unless it broke off.
            report = folder / "units" / f"{case.name.split('::')[-1]}.xml"
            own = _cases(report) if report.exists() else []
            cases += own
            if not own or (case.outcome == "failed" and not any(one.outcome == "failed" for one in own)):
                cases.append(case)
    return cases


def _print_times(folder: Path, cases: list[Case]) -> None:
    print("== Where the time went, in seconds")
    steps = folder / "steps.txt"
    for line in steps.read_text().splitlines() if steps.exists() else []:
        seconds, name = line.split(maxsplit=1)
        print(f"{seconds:>7}  {name}")
    print("== Tests by folder, some of which ran side by side")
    totals: Counter[str] = Counter()
    for case in cases:
        totals[case.folder] += case.seconds  # type: ignore[assignment]
    for name, total in totals.most_common():
        print(f"{total:7.1f}  {name}")
    print(f"== The slowest {_SLOWEST}")
    for case in sorted(cases, key=lambda case: -case.seconds)[:_SLOWEST]:
        print(f"{case.seconds:7.1f}  {case.name}")


def main(arguments: list[str]) -> int:
    counts: Counter[str] = Counter()
    for folder in (Path(argument) for argument in arguments if argument != "--times"):
        cases = read(folder)
        if "--times" in arguments:
            _print_times(folder, cases)
        counts.update(case.outcome for case in cases)
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
