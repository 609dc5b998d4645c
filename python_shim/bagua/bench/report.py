# SPDX-License-Identifier: Apache-2.0
"""The table on the terminal, and the JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bagua.bench.measure import Result


def header(environment: dict[str, Any]) -> str:
    """Return what stands above the table."""
    where = f"{environment['ranks']} ranks on {environment['hosts']} host{'s' if environment['hosts'] > 1 else ''}"
    options = "".join(f", {name}={value}" for name, value in environment["options"].items())
    where += f" ({environment['network']})" if environment["network"] else ""
    vs = environment["vs"]
    columns = f"{'test':<28}{'size':>10}  {'dtype':<9}{'min us':>10}{'median':>10}{'max':>10}"
    columns += f"{'algbw':>9}{'busbw':>9}{'sent':>13}  {'check':<6}"
    if vs:
        columns += f"{vs + ' us':>10}{'ratio':>7}"
    return (
        f"# bagua {environment['bagua']}, torch {environment['torch']}, {where}, {environment['device']}{options}\n"
        f"# {environment['iterations']} iterations after {environment['warmup']}; GB/s; bytes sent per rank\n{columns}"
    )


def size_text(size: int) -> str:
    """Return bytes in the largest unit that divides them."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size and size % (1 << shift) == 0:
            return f"{size >> shift} {unit}"
    return f"{size} B" if size else "-"


def line(result: Result) -> str:
    """Return a line of the table."""
    seconds = result.seconds
    text = f"{result.test:<28}{size_text(result.size):>10}  {result.dtype:<9}"
    text += "".join(f"{1e6 * value:>10.1f}" for value in (seconds.minimum, seconds.median, seconds.maximum))
    text += "".join(f"{value / 1e9:>9.3f}" if result.size else f"{'-':>9}" for value in (result.algbw, result.busbw))
    text += f"{result.wire_bytes:>13,.0f}" if result.wire_bytes is not None else f"{'-':>13}"
    text += f"  {_check_text(result.check):<6}"
    if result.vs is not None:
        text += f"{1e6 * result.vs.median:>10.1f}{result.ratio:>7.2f}"
    elif result.vs_missing is not None:
        text += f"{'no':>10}{'-':>7}  {result.vs_missing}"
    return f"{text}\n    {result.check}" if result.check else text


def _check_text(check: str | None) -> str:
    return "-" if check is None else "WRONG" if check else "ok"


def write_json(path: Path, environment: dict[str, Any], results: list[Result]) -> None:
    """Write all figures, in bytes and seconds."""
    content = {"environment": environment, "results": [result.to_json() for result in results]}
    path.write_text(json.dumps(content, indent=1) + "\n")
