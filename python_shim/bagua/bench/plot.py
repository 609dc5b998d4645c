# SPDX-License-Identifier: Apache-2.0
"""A picture of the times and bandwidths over the sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bagua.bench.measure import Result


def write_plot(path: Path, environment: dict[str, Any], results: list[Result]) -> None:
    """Draw a line per test and dtype; with --vs, dashed, that of the other backend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, bandwidths) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    lines: dict[str, list[Result]] = {}
    for result in results:
        if result.size:
            lines.setdefault(f"{result.test}, {result.dtype}", []).append(result)
    times.set_prop_cycle(color=[pyplot.colormaps["tab20"](index) for index in range(20)])
    for label, points in lines.items():
        sizes = [point.size for point in points]
        (drawn,) = times.plot(sizes, [1e6 * point.seconds.median for point in points], marker="o", ms=3, label=label)
        bandwidths.plot(sizes, [point.busbw / 1e9 for point in points], marker="o", ms=3, color=drawn.get_color())
        rivals = [point for point in points if point.vs is not None]
        if rivals:
            seconds = [point.vs.median for point in rivals if point.vs is not None]
            sizes = [point.size for point in rivals]
            times.plot(sizes, [1e6 * value for value in seconds], "--", lw=1, color=drawn.get_color())
            speeds = [point.busbw * point.seconds.median / value for point, value in zip(rivals, seconds, strict=True)]
            bandwidths.plot(sizes, [speed / 1e9 for speed in speeds], "--", lw=1, color=drawn.get_color())
    for axes, label in ((times, "median time of a call, µs"), (bandwidths, "busbw, GB/s")):
        axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel=label)
        axes.grid(alpha=0.3, which="major")
    figure.legend(loc="outside right upper", fontsize="small")
    vs = f"; dashed: {environment['vs']}" if environment["vs"] else ""
    figure.suptitle(
        f"{environment['ranks']} ranks, {environment['hosts']} host(s), {environment['device']}, "
        f"torch {environment['torch']}{vs}",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
