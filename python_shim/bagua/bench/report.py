# SPDX-License-Identifier: Apache-2.0
"""The table on the terminal, and the JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bagua._native import _C
from bagua._registry import describe
from bagua.bench.measure import Result

# Medians that are closer than this are not told apart.
_NOISE = 1.05


def header(environment: dict[str, Any]) -> str:
    """Return what stands above the table."""
    where = f"{environment['ranks']} ranks on {environment['hosts']} host{'s' if environment['hosts'] > 1 else ''}"
    model = environment["model"]
    if model:
        compute = environment["compute"]
        where += f", shapes of {model}" + (f" with {1e3 * compute:,.0f} ms of arithmetic" if compute else "")
    options = "".join(f", {name}={value}" for name, value in environment["options"].items())
    where += f" ({environment['network']})" if environment["network"] else ""
    where += ", encrypted between hosts" if environment["is_encrypted"] else ""
    vs = environment["vs"]
    columns = f"{'test':<28}{'size':>10}  {'dtype':<9}{'min us':>10}{'median':>10}{'max':>10}"
    columns += f"{'algbw':>9}{'busbw':>9}{'sent':>13}  {'check':<6}"
    if environment["hosts"] > 1:
        columns += f"{'tcp':>8}{'resent':>9}{'rtt ms':>9}"
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
    if size >= 10**7:
        return f"{size / 1e6:.1f} MB"
    return f"{size} B" if size else "-"


def line(result: Result) -> str:
    """Return a line of the table."""
    seconds = result.seconds
    text = f"{result.test:<28}{size_text(result.size):>10}  {result.dtype:<9}"
    text += "".join(f"{1e6 * value:>10.1f}" for value in (seconds.minimum, seconds.median, seconds.maximum))
    text += "".join(f"{value / 1e9:>9.3f}" if result.size else f"{'-':>9}" for value in (result.algbw, result.busbw))
    text += f"{result.wire_bytes:>13,.0f}" if result.wire_bytes is not None else f"{'-':>13}"
    text += f"  {_check_text(result.check):<6}"
    if result.line is not None:
        seen = result.line
        share, round_trip = f"{100 * seen.resent_share:.3f}%", f"{1e3 * seen.round_trip:.2f}"
        cells = ("+".join(seen.congestion), share, round_trip) if seen.segments else ("-", "-", "-")
        text += f"{cells[0]:>8}{cells[1]:>9}{cells[2]:>9}"
    if result.vs is not None:
        text += f"{1e6 * result.vs.median:>10.1f}{result.ratio:>7.2f}"
    elif result.vs_missing is not None:
        text += f"{'no':>10}{'-':>7}  {result.vs_missing}"
    return f"{text}\n    {result.check}" if result.check else text


def verdict(environment: dict[str, Any], results: list[Result]) -> list[str]:
    """Return what the right results come to, a sentence for each kind of comparison, if there was one."""
    right = [result for result in results if not result.check]
    sentences = [_against(environment["vs"], right), _fastest(right)]
    return [sentence for sentence in sentences if sentence]


def _against(vs: str | None, results: list[Result]) -> str:
    """Say how many times as fast as the other backend bagua is."""
    ratios = sorted(((r.ratio, _name(r)) for r in results if r.ratio is not None), key=lambda pair: pair[0])
    if not ratios:
        return ""
    (low, lowest), (high, _) = ratios[0], ratios[-1]
    if len(ratios) == 1:
        return f"bagua is {low:.2f} times as fast as {vs} at {lowest}."
    text = f"bagua is {low:.2f} to {high:.2f} times as fast as {vs} at what was measured"
    slower = [f"{name} ({ratio:.2f})" for ratio, name in ratios if ratio < 1 / _NOISE]
    if not slower:
        return f"{text}, least at {lowest}."
    more = f" and {len(slower) - 3} more" if len(slower) > 3 else ""
    return f"{text}, and slower at {', '.join(slower[:3])}{more}."


def _fastest(results: list[Result]) -> str:
    """Say which algorithm was the fastest at each size, of those that communicate in every step."""
    algorithms = set(_C.algorithm_names())
    steps: dict[tuple[int, str], list[Result]] = {}
    for result in results:
        if result.test in algorithms and not describe(result.test)["runs_in_background"]:
            steps.setdefault((result.size, result.dtype), []).append(result)
    winners: dict[str, list[str]] = {}
    dtypes = {dtype for _, dtype in steps}
    for (size, dtype), rivals in steps.items():
        if len(rivals) < 2:
            continue
        limit = _NOISE * min(rival.seconds.median for rival in rivals)
        names = " and ".join(_with_precision(rival) for rival in rivals if rival.seconds.median <= limit)
        winners.setdefault(names, []).append(size_text(size) + (f" of {dtype}" if len(dtypes) > 1 else ""))
    if not winners:
        return ""
    wins = "; ".join(f"{names} at {', '.join(sizes)}" for names, sizes in winners.items())
    return f"Fastest with messages in every step: {wins}."


def _with_precision(result: Result) -> str:
    """Say so where an algorithm sent as many bytes as an allreduce of all bits, as some do with a single vector."""
    least = result.size * result.busbw / result.algbw
    is_exact = result.wire_bytes is not None and result.wire_bytes >= 0.99 * least
    return f"{result.test} (full precision)" if is_exact else result.test


def _name(result: Result) -> str:
    return f"{result.test} of {size_text(result.size)}" if result.size else result.test


def _check_text(check: str | None) -> str:
    return "-" if check is None else "WRONG" if check else "ok"


def write_json(path: Path, environment: dict[str, Any], results: list[Result]) -> None:
    """Write all figures, in bytes and seconds."""
    content = {"environment": environment, "results": [result.to_json() for result in results]}
    path.write_text(json.dumps(content, indent=1) + "\n")
