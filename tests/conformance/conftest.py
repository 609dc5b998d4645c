# SPDX-License-Identifier: Apache-2.0
"""Says at the end how many of PyTorch's tests passed, for each number of ranks."""

from collections import Counter

import pytest
from devices import DEVICE

_WHOSE = {"cpu": "all of which stock Gloo passes", "cuda": "which are those that torch has for NCCL"}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    ran: Counter[int] = Counter()
    passed: Counter[int] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            ranks = dict(report.user_properties).get("torch suite ranks")
            if ranks is not None and report.when == "call":
                ran[ranks] += 1
                passed[ranks] += outcome == "passed"
    for ranks in sorted(ran):
        terminalreporter.write_line(
            f"PyTorch's own suite, {ranks} ranks: backend {config.getoption('--backend')} passes {passed[ranks]} "
            f"of the {ran[ranks]} tests run, " + _WHOSE[DEVICE]
        )
