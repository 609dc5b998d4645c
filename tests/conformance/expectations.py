# SPDX-License-Identifier: Apache-2.0
"""What stock Gloo does with each of PyTorch's tests, one file per torch minor version and number of ranks."""

from pathlib import Path
from typing import NamedTuple

_FOLDER = Path(__file__).parent / "expected"

PASSED = "pass"
SKIPPED = "skip"

# Each word of torch's own skip messages that stands for "there are too few GPUs here".
_GPU_WORDS = ("cuda", "accelerator", "gpu")


class Expectation(NamedTuple):
    outcome: str
    reason: str


def expectation_path(torch_version: str, world_size: int) -> Path:
    minor = ".".join(torch_version.split(".")[:2])
    return _FOLDER / f"torch-{minor}-ranks-{world_size}.txt"


def read_expectations(path: Path) -> dict[str, Expectation]:
    expectations: dict[str, Expectation] = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            outcome, name, *reason = line.split(maxsplit=2)
            expectations[name] = Expectation(outcome, " ".join(reason))
    return expectations


def write_expectations(path: Path, expectations: dict[str, Expectation], command: str) -> None:
    passed = sum(expectation.outcome == PASSED for expectation in expectations.values())
    lines = [f"# Stock Gloo passes {passed} of {len(expectations)} tests without a GPU. Written by: {command}"]
    # Passed tests first: the part a reader looks for.
    for name, expectation in sorted(expectations.items(), key=lambda item: (item[1].outcome != PASSED, item[0])):
        lines.append(f"{expectation.outcome} {name} {expectation.reason}".rstrip())
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def describe_skip(reason: str) -> str:
    if any(word in reason.lower() for word in _GPU_WORDS):
        return f"skipped for want of a GPU: {reason}"
    return f"does not apply, stock Gloo skips it too: {reason}"
