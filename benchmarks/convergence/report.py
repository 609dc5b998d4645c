# SPDX-License-Identifier: Apache-2.0
"""The tables of RESULTS.md and the figures beside it, from the records of all runs that are there."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plan import CLOTHES_SECTIONS, DICTIONARY_SECTIONS, FIRST_SECTIONS, SECTIONS, SWEEP
from runs import TORCHS_POWER_SGD, Row, Section
from training import BATCH_OF_LOSSES

Record = dict[str, Any]
END = "<!-- end of the table -->"
PALETTE = ("#c8102e", "#1f6fb4", "#2e8b57", "#e8871e", "#8458b3", "#5bb5e0", "#8a5a2b", "#d65fa0")


class Results:
    """Records by section, row and seed: those that are there. Of several processors' the first counts."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._by_name: dict[str, list[Record]] = {}
        for record in records:
            self._by_name.setdefault(record["run"], []).append(record)

    def all_of(self, section: Section, row: Row) -> dict[int, Record]:
        """Records by seed, failures among them."""
        names = {seed: section.run(row, seed).name for seed in range(section.seeds)}
        return {seed: self._by_name[name][0] for seed, name in names.items() if name in self._by_name}

    def of(self, section: Section, row: Row) -> dict[int, Record]:
        """Records by seed of the runs that reached their end with a finite loss."""
        return {seed: record for seed, record in self.all_of(section, row).items() if has_ended(section, record)}

    def pairs(self, section: Section, row: Row) -> list[tuple[Record, Record]]:
        """Records of a row with their baselines: of equal seed, and of the same processor if there is one."""
        pairs = []
        for seed, own in self.of(section, row).items():
            name = section.run(row.baseline, seed).name
            bases = [record for record in self._by_name.get(name, ()) if has_ended(section, record)]
            if bases:
                alike = [base for base in bases if base.get("processor") == own.get("processor")]
                pairs.append((own, (alike or bases)[0]))
        return pairs

    def are_there(self, section: Section) -> bool:
        """Whether there is more than a baseline, which sections share."""
        return any(self.of(section, row) for row in section.rows if row != row.baseline)


def quality(section: Section, record: Record, number: int = 0) -> float:
    return float(record["qualities"][section.task.qualities[number]])


def has_ended(section: Section, record: Record) -> bool:
    return "error" not in record and math.isfinite(quality(section, record))


def percents_above_baseline(section: Section, row: Row, results: Results) -> list[float]:
    """How much more loss than the baseline of the same seed, by seeds that both have."""
    return [100 * (quality(section, own) / quality(section, base) - 1) for own, base in results.pairs(section, row)]


# --- Tables ----------------------------------------------------------------------------------------------------------


def with_range(values: Sequence[float], style: str, digits: int) -> str:
    # 0.0 +: a rounded -0.00001 is 0.
    numbers = (mean(values), min(values), max(values)) if len(values) > 1 else values
    texts = [f"{0.0 + round(value, digits):{style}}" for value in numbers]
    return f"{texts[0]} ({texts[1]} to {texts[2]})" if len(values) > 1 else texts[0]


class Column(NamedTuple):
    """A column of a table: its head, and what it says of a row with the records of its runs."""

    head: str
    cell: Callable[[Section, Row, list[Record], Results], str]


def quality_column(section: Section, number: int) -> Column:
    def cell(section: Section, row: Row, records: list[Record], results: Results) -> str:
        return with_range([quality(section, record, number) for record in records], ".4f", 4)

    return Column(section.task.qualities[number], cell)


def gap(section: Section, row: Row, records: list[Record], results: Results) -> str:
    if row == row.baseline:
        return "is one"
    gaps = percents_above_baseline(section, row, results)
    return with_range(gaps, "+.2f", 2) if gaps else ""


def apart(section: Section, row: Row, records: list[Record], results: Results) -> str:
    distance = mean(record["distance"]["half_way"] for record in records)
    return f"{100 * distance:.2g} %" if distance else "no"


def bytes_per_step(section: Section, row: Row, records: list[Record], results: Results) -> str:
    """With what it is of the bytes of a mean in float32, which sends 2 (n-1)/n gradients."""
    if records[0]["bytes_per_step"] is None:
        return "not counted"
    own = mean(record["bytes_per_step"] for record in records)
    float32 = 8 * (section.ranks - 1) / section.ranks * records[0]["parameters"]
    return f"{own:,.0f} ({own / float32:.3g})"


def seeds(section: Section, row: Row, records: list[Record], results: Results) -> str:
    failures = sum(len(record.get("failures", ())) for record in records)
    every = results.all_of(section, row).values()
    errors = sum("error" in record for record in every)
    diverged = len(every) - len(records) - errors
    notes = [f"**{diverged} more diverged**"] if diverged else []
    notes += [f"{failures} more failed, and were run again"] if failures else []
    notes += [f"**{errors} failed**"] if errors else []
    return "; ".join([str(len(records)), *notes])


def label(section: Section, row: Row, records: list[Record], results: Results) -> str:
    return row.label if row.rate is None else f"{row.label}, rate {row.rate:g}"


def columns(section: Section) -> list[Column]:
    return [
        Column("algorithm", label),
        Column("optimizer", lambda section, row, records, results: row.optimizer),
        quality_column(section, 0),
        Column("above its baseline, %", gap),
        *(quality_column(section, number) for number in range(1, len(section.task.qualities))),
        Column("ranks apart half-way", apart),
        Column("bytes sent per step (of float32's)", bytes_per_step),
        Column("seeds", seeds),
    ]


def markdown(rows: list[list[str]]) -> str:
    head, *body = rows
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *body))


def table(section: Section, results: Results) -> str:
    own = columns(section)
    rows = [[column.head for column in own]]
    for row in section.rows:
        records = list(results.of(section, row).values())
        if records:
            rows.append([column.cell(section, row, records, results) for column in own])
        elif every := results.all_of(section, row):
            ends = {seed: record.get("error", "diverged").strip().splitlines()[-1] for seed, record in every.items()}
            failed = f"**failed** with seeds {', '.join(map(str, ends))}: {'; '.join(dict.fromkeys(ends.values()))}"
            rows.append([row.label, row.optimizer, failed, *[""] * (len(own) - 3)])
    return markdown(rows)


def rates_table(results: Results) -> str:
    rows = [["optimizer", "highest learning rate", SWEEP.task.qualities[0]]]
    for row in SWEEP.rows:
        for record in results.of(SWEEP, row).values():
            rows.append([row.optimizer, f"{row.rate:g}", f"{quality(SWEEP, record):.4f}"])
    return markdown(rows)


def codecs_table(section: Section, results: Results) -> str:
    """Errors of the codecs on the gradients of the baseline, while it trained."""
    record = results.of(section, section.rows[0].baseline)[0]
    steps = list(record["codecs"])
    rows = [["codec", "of", *(f"step {step}" for step in steps)]]
    for codec in record["codecs"][steps[0]]:
        for what, words in (("gradient", "a rank's gradient"), ("mean", "the mean of the ranks")):
            rows.append([codec, words, *(f"{record['codecs'][step][codec][what]:.2g}" for step in steps)])
    return markdown(rows)


def facts(section: Section, results: Results) -> str:
    """What the rows of a section share."""
    task = section.task
    some = next(record for row in section.rows for record in results.of(section, row).values())
    optimizers = {row.optimizer.removeprefix("Q") for row in section.rows}
    rates = " and ".join(f"{rate:g} for {name}" for name, rate in task.rates.items() if name in optimizers)
    epoch = task.steps // task.epochs * task.batch
    passes = f"{task.epochs} epochs of {epoch:,} examples, " if task.epochs > 1 else ""
    text = (
        f"{some['parameters']:,} parameters, {passes}{task.steps} steps of {task.batch} examples over all ranks, "
        f"highest learning rate {rates}."
    )
    for row in section.rows:
        if row.algorithm == "async" and (records := results.of(section, row)):
            rounds = mean(record["rounds"] for record in records.values())
            text += f" async averaged the weights {rounds:,.0f} times."
    records = [record for row in section.rows for record in results.of(section, row).values()]
    made_by = [
        f"{what} {', '.join(names)}"
        for what in ("torch", "commit", "processor")
        if (names := sorted({record[what] for record in records if what in record}))
    ]
    return f"{text} {'; '.join(made_by)}."


def replace(page: Path, name: str, text: str) -> None:
    begin = f"<!-- table {name}: written by `make convergence` -->"
    before, found, rest = page.read_text().partition(begin)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"{page} lacks the lines {begin!r} and {END!r}, between which a table belongs")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{END}{after}")


# --- Figures ---------------------------------------------------------------------------------------------------------


def curve(section: Section, row: Row, results: Results) -> list[float]:
    """Training loss, its mean over the seeds."""
    records = results.of(section, row).values()
    return [mean(values) for values in zip(*(record["losses"] for record in records), strict=True)]


def curve_above_baseline(section: Section, row: Row, results: Results) -> list[float]:
    pairs = [(own["losses"], base["losses"]) for own, base in results.pairs(section, row)]
    gaps = [[value - other for value, other in zip(*pair, strict=True)] for pair in pairs]
    return [mean(values) for values in zip(*gaps, strict=True)]


def styles_of(section: Section, rows: Sequence[Row]) -> list[tuple[Row, dict[str, Any]]]:
    """Baselines in black, the others in a colour each."""
    bases = [row for row in rows if row == row.baseline]
    others = [row for row in rows if row not in bases]
    styles: list[tuple[Row, dict[str, Any]]] = [
        (row, {"color": "#222222", "linewidth": 2.2, "linestyle": "-:"[number % 2]}) for number, row in enumerate(bases)
    ]
    for number, row in enumerate(others):
        line = "-" if number < len(PALETTE) else "--"
        styles.append((row, {"color": PALETTE[number % len(PALETTE)], "linewidth": 1.2, "linestyle": line}))
    return styles


def draw_rows(section: Section, rows: Sequence[Row], results: Results, title: str, losses: Axes, gaps: Axes) -> None:
    optimizers = {row.optimizer for row in rows}
    for row, style in styles_of(section, rows):
        values = curve(section, row, results)
        steps = [BATCH_OF_LOSSES * i + BATCH_OF_LOSSES // 2 for i in range(len(values))]
        words = f"{row.label}, {row.optimizer}" if len(optimizers) > 1 else row.label
        losses.plot(steps, values, label=words, **style)
        if row != row.baseline:
            gaps.plot(steps, curve_above_baseline(section, row, results), **style)
    losses.set_title(title, loc="left", fontsize=10)
    losses.legend(fontsize=7, frameon=False)
    gaps.axhline(0, color="#222222", linewidth=0.8)
    gaps.set_xlabel("step")
    for axes in (losses, gaps):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e4e4")
        axes.set_axisbelow(True)


Plot = tuple[Section, list[Row], str]


def draw(plots: Sequence[Plot], results: Results, path: Path) -> None:
    # Text as text, and nothing that changes from one drawing to the next.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "bagua", "font.size": 9})
    figure = Figure(figsize=(4.6 * len(plots), 7.2), layout="constrained")
    axes = figure.subplots(2, len(plots), sharex="col", squeeze=False)
    for column, (section, rows, title) in enumerate(plots):
        draw_rows(section, rows, results, title, axes[0][column], axes[1][column])
    axes[0][0].set_ylabel("training loss")
    axes[1][0].set_ylabel("training loss less that of the baseline")
    figure.savefig(path, metadata={"Date": None})
    lines = [text.rstrip() for text in path.read_text().splitlines()]
    path.write_text(os.linesep.join(lines) + os.linesep)


def with_records(section: Section, results: Results) -> list[Row]:
    """Rows that can be drawn: their baseline is there too."""
    return [row for row in section.rows if results.pairs(section, row)]


def draw_families(section: Section, results: Results, path: Path) -> None:
    """One section, with a column for each family of its rows."""
    rows = with_records(section, results)
    families = dict.fromkeys(row.family for row in rows if row.family)
    plots: list[Plot] = [
        (section, [row for row in rows if row.family in ("", family) and row.algorithm != TORCHS_POWER_SGD], family)
        for family in families
    ]
    if plots:
        draw(plots, results, path)


def write(records: Sequence[Record], page: Path, figures: Path) -> None:
    """Replace the tables of the page for which there are records, and draw their figures."""
    results = Results(records)
    for section in SECTIONS:
        if section != SWEEP and results.are_there(section):
            replace(page, section.name, f"{facts(section, results)}\n\n{table(section, results)}")
    if results.are_there(SWEEP):
        replace(page, SWEEP.name, rates_table(results))
    for section in (*DICTIONARY_SECTIONS, *CLOTHES_SECTIONS):
        row = section.rows[0]
        if section.run(row, 0).measures_codecs and 0 in results.of(section, row):
            replace(page, f"{section.name}_codecs", codecs_table(section, results))
    draw_families(DICTIONARY_SECTIONS[0], results, figures / "convergence_newer.svg")
    firsts = [section for section in FIRST_SECTIONS if results.are_there(section)]
    if firsts:
        plots = [(section, with_records(section, results), section.title) for section in firsts]
        draw(plots, results, figures / "convergence.svg")
