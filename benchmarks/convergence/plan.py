# SPDX-License-Identifier: Apache-2.0
"""Which runs there are, in which order: sections (a task on a number of ranks) and their rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from runs import (
    DICTIONARY,
    FASHION_MNIST,
    FLAT,
    LICENCES,
    POWER_SGD_WARMUP,
    SHARDED,
    SYNC_INTERVAL_MS,
    TORCHS_POWER_SGD,
    Row,
    Run,
    Section,
    baseline,
)
from tasks import Task

# --- The first algorithms --------------------------------------------------------------------------------------------


def centralized(optimizer: str) -> tuple[Row, ...]:
    return (
        Row("gradient_allreduce", optimizer, "gradient_allreduce"),
        Row("bytegrad", optimizer, "bytegrad", FLAT),
    )


def decentralized(optimizer: str) -> tuple[Row, ...]:
    return (
        Row("decentralized, all", optimizer, "decentralized", {**FLAT, "peer_selection_mode": "all"}),
        Row("decentralized, shift_one", optimizer, "decentralized", {**FLAT, "peer_selection_mode": "shift_one"}),
        Row("low_precision_decentralized", optimizer, "low_precision_decentralized", FLAT),
        Row("async", optimizer, "async", {"sync_interval_ms": SYNC_INTERVAL_MS}),
    )


# The variance frozen without 8 bits, and with them.
QADAM = (baseline("QAdam"), Row("qadam", "QAdam", "qadam", FLAT))


# --- Few bits, low rank, rounds --------------------------------------------------------------------------------------


def few_bits(optimizer: str) -> tuple[Row, ...]:
    def row(codec: str, feedback: bool) -> Row:
        label = f"quantized_allreduce, {codec}" + ("" if feedback else ", no feedback")
        options = {**FLAT, "codec": codec, "error_feedback": feedback}
        return Row(label, optimizer, "quantized_allreduce", options, "few bits")

    return tuple(row(codec, feedback) for feedback in (True, False) for codec in ("4bit", "2bit", "1bit"))


def low_rank(optimizer: str, task: Task, ranks: tuple[int, ...] = (1, 2, 4, 8)) -> tuple[Row, ...]:
    warmup = {"start_step": task.steps // POWER_SGD_WARMUP}
    return tuple(
        Row(f"powersgd, rank {rank}", optimizer, "powersgd", {**FLAT, "rank": rank, **warmup}, "low rank")
        for rank in ranks
    )


def torchs_low_rank(optimizer: str, task: Task, ranks: tuple[int, ...] = (1, 2, 4, 8)) -> tuple[Row, ...]:
    """In one bucket: with DDP's own buckets 20 of 20 runs ended in Gloo's "Received data size doesn't match"."""
    options = {"start_step": task.steps // POWER_SGD_WARMUP, "bucket_cap_mb": 1000}
    return tuple(
        Row(
            f"{TORCHS_POWER_SGD}, rank {n}, one bucket", optimizer, TORCHS_POWER_SGD, {"rank": n, **options}, "low rank"
        )
        for n in ranks
    )


def local_sgd(optimizer: str, every: int) -> Row:
    options = {"sync_every": every, "average_buffers": True}
    return Row(f"local_sgd, {every} steps", optimizer, "local_sgd", options, "rounds")


def diloco(
    optimizer: str,
    every: int,
    codec: str | None = None,
    fragments: int = 1,
    outer: tuple[float, float] | None = None,
) -> Row:
    """With `outer`, a rate and a momentum of the outer optimizer other than the published 0.7 and 0.9."""
    label = f"diloco, {every} steps"
    if fragments > 1:
        label += f", {fragments} fragments"
    if codec:
        label += f", {codec}"
    options: dict[str, Any] = {"sync_every": every, "fragments": fragments, "codec": codec, "average_buffers": True}
    if outer:
        label += f", outer {outer[0]:g} {outer[1]:g}"
        options |= {"outer_lr": outer[0], "outer_momentum": outer[1]}
    return Row(label, optimizer, "diloco", options, "rounds")


# Rate and momentum of the outer optimizer for few rounds, see OUTER. The published ones are for hundreds.
FEW_ROUNDS = (0.7, 0.5)


def rounds(optimizer: str) -> tuple[Row, ...]:
    """What is asked for first; fragments divide the steps of a round."""
    return (
        diloco(optimizer, 30, "4bit", outer=FEW_ROUNDS),
        local_sgd(optimizer, 30),
        diloco(optimizer, 30, "4bit"),
        diloco(optimizer, 100, "4bit", 4, FEW_ROUNDS),
        diloco(optimizer, 30),
        diloco(optimizer, 100),
        diloco(optimizer, 100, "4bit", 4),
        local_sgd(optimizer, 100),
        diloco(optimizer, 10),
        local_sgd(optimizer, 10),
        diloco(optimizer, 100, None, 4),
        diloco(optimizer, 100, "4bit"),
        diloco(optimizer, 30, "4bit", 3),
        diloco(optimizer, 30, None, 3),
        diloco(optimizer, 10, "4bit"),
    )


def newer(optimizer: str, task: Task) -> tuple[Row, ...]:
    """With two ranks. What is asked of rounds, and of torch's hook, is asked of one task and optimizer."""
    all_of_them = task is DICTIONARY and optimizer == "AdamW"
    return (
        baseline(optimizer),
        *few_bits(optimizer),
        *low_rank(optimizer, task),
        *(rounds(optimizer) if all_of_them else rounds(optimizer)[:2]),
        *(torchs_low_rank(optimizer, task) if all_of_them else torchs_low_rank(optimizer, task, (1, 4))),
    )


def newer_of_four(optimizer: str, task: Task) -> tuple[Row, ...]:
    """With four ranks a step takes twice as long: what the statements are about."""
    if task is DICTIONARY and optimizer == "AdamW":
        return (baseline(optimizer), *few_bits(optimizer), *low_rank(optimizer, task, (1, 4)), *rounds(optimizer)[:10])
    four_bits = tuple(row for row in few_bits(optimizer) if "4bit" in row.label)
    return (baseline(optimizer), *four_bits, *low_rank(optimizer, task, (4,)))


# Learning rates of the baselines, chosen with seed 0 in factors of two.
RATES = {"AdamW": (0.0005, 0.001, 0.002, 0.004), "SGD": (0.05, 0.1, 0.2, 0.4)}
SWEEP = Section(
    "dictionary_rates",
    DICTIONARY,
    2,
    tuple(baseline(optimizer, rate) for optimizer, rates in RATES.items() for rate in rates),
    seeds=1,
    about=": learning rates of the baselines",
)


# --- What a user gets who types a name and nothing else --------------------------------------------------------------


def defaults(optimizer: str) -> tuple[Row, ...]:
    """With the options that have no default, and beside them what was the default before.

    Without powersgd, whose `start_step` lies behind the end of these runs.
    """

    def row(label: str, algorithm: str, options: dict[str, Any]) -> Row:
        return Row(f"{label}, as given", optimizer, algorithm, {**FLAT, **options}, as_given=True)

    return (
        baseline(optimizer),
        row("bytegrad", "bytegrad", {}),
        row("bytegrad, minmax_uint8", "bytegrad", {"codec": "minmax_uint8"}),
        row("quantized_allreduce", "quantized_allreduce", {}),
        row("quantized_allreduce, 2bit, guard adapt", "quantized_allreduce", {"codec": "2bit", "guard": "adapt"}),
        row("quantized_allreduce, 1bit, guard adapt", "quantized_allreduce", {"codec": "1bit", "guard": "adapt"}),
        Row("diloco, 30 steps, as given", optimizer, "diloco", {"sync_every": 30}, as_given=True),
    )


def sharded(optimizer: str) -> tuple[Row, ...]:
    """Models of fully_shard between hosts that have a rank each."""

    def row(gradients: str, weights: str) -> Row:
        options = {"gradients": gradients, "weights": weights}
        return Row(f"FSDP2, {gradients}, gathers {weights}", optimizer, SHARDED, options)

    return (baseline(optimizer), row("int8", "cache"), row("int8", "int8"), row("4bit", "cache"), row("4bit", "4bit"))


def newer_section(task: Task, optimizer: str, ranks: int) -> Section:
    rows = newer(optimizer, task) if ranks == 2 else newer_of_four(optimizer, task)
    return Section(f"{task.name}_{optimizer.lower()}_{ranks}", task, ranks, rows, about=f", {optimizer}")


DICTIONARY_SECTIONS = tuple(
    newer_section(DICTIONARY, optimizer, ranks) for ranks in (2, 4) for optimizer in ("AdamW", "SGD")
)
ONE_BIT = tuple(row for row in few_bits("AdamW") if "1bit" in row.label)
# With AdamW error feedback loses: is it the size of the steps?
FEEDBACK = Section(
    "dictionary_feedback",
    DICTIONARY,
    2,
    (baseline("AdamW"), *(replace(row, rate=rate) for row in ONE_BIT for rate in (0.0005, 0.002))),
    seeds=1,
    about=": feedback and learning rates",
)
# Chosen with seed 0: 13 rounds.
OUTER = Section(
    "dictionary_outer",
    DICTIONARY,
    2,
    (
        baseline("AdamW"),
        *(
            diloco("AdamW", 30, "4bit", outer=outer)
            for outer in ((1.0, 0.0), (1.0, 0.2), (1.0, 0.4), (0.7, 0.2), FEW_ROUNDS)
        ),
    ),
    seeds=1,
    about=": the outer optimizer",
)
# With SGD low rank diverges with some seeds, in the steps after it begins: does it when the learning rate has had its
# peak, or is half as high, or with other starting factors?
LATE = 120
STABLE = Section(
    "dictionary_stable",
    DICTIONARY,
    2,
    (
        baseline("SGD"),
        *(
            replace(row, label=f"{row.label}, from step {LATE}", options={**row.options, "start_step": LATE})
            for row in low_rank("SGD", DICTIONARY, (1, 8))
        ),
        *(replace(row, rate=0.1) for row in low_rank("SGD", DICTIONARY, (1, 8))),
        *torchs_low_rank("SGD", DICTIONARY, (8,)),
        *(
            replace(row, label=f"{row.label}, starting factors of seed {seed}", options={**row.options, "seed": seed})
            for row in low_rank("SGD", DICTIONARY, (8,))
            for seed in (1, 2, 3)
        ),
    ),
    about=": low rank with SGD",
)
CLOTHES_SECTIONS = tuple(
    newer_section(FASHION_MNIST, optimizer, ranks) for ranks in (2, 4) for optimizer in ("AdamW", "SGD")
)
FIRST_SECTIONS = (
    Section(
        "fashion_mnist_2",
        FASHION_MNIST,
        2,
        (baseline("SGD"), *centralized("SGD"), *decentralized("SGD"), baseline("Adam"), *QADAM),
        seeds=3,
    ),
    Section(
        "language_model_2", LICENCES, 2, (baseline("Adam"), *centralized("Adam"), *QADAM, *decentralized("Adam")), 3
    ),
    # With two ranks every peer is the same one. What a rank hears from some of the others only shows from four on.
    Section("language_model_4", LICENCES, 4, (baseline("Adam"), *decentralized("Adam")), 3),
)
DEFAULT_SECTIONS = tuple(
    Section(
        f"{task.name}_defaults_{optimizer.lower()}_{ranks}",
        task,
        ranks,
        defaults(optimizer),
        seeds=5 if ranks == 2 else 3,
        about=f", {optimizer}: defaults",
    )
    for task, ranks in ((DICTIONARY, 2), (FASHION_MNIST, 2), (DICTIONARY, 4), (FASHION_MNIST, 4))
    for optimizer in ("AdamW", "SGD")
)
SHARDED_SECTION = Section(
    "dictionary_sharded", DICTIONARY, 2, sharded("AdamW"), seeds=3, about=", AdamW: sharded models"
)
SECTIONS = (
    *DICTIONARY_SECTIONS,
    *DEFAULT_SECTIONS,
    SHARDED_SECTION,
    OUTER,
    STABLE,
    *CLOTHES_SECTIONS,
    FEEDBACK,
    SWEEP,
    *FIRST_SECTIONS,
)


# What is stated of error feedback, low rank and rounds is about these.
CORE = ("DDP without a hook", "quantized_allreduce, 4bit")
STATED = (*CORE, "quantized_allreduce", "powersgd, rank 4", "diloco, 30 steps, 4bit", "local_sgd, 30 steps")
LOW_RANK = ("powersgd",)


def in_order() -> Iterator[tuple[Section, Iterable[int], tuple[str, ...]]]:
    """Sections, seeds, and the beginnings of the labels of rows, the most telling ones first."""
    adamw, sgd, adamw_of_four, sgd_of_four = DICTIONARY_SECTIONS
    of_two, of_four = (adamw, sgd, *CLOTHES_SECTIONS[:2]), (adamw_of_four, sgd_of_four, *CLOTHES_SECTIONS[2:])
    every = ("",)
    yield OUTER, [0], every
    yield adamw, [0], every
    yield from ((section, [0], STATED) for section in of_two)
    yield from ((section, [seed], CORE) for seed in range(5) for section in of_two)
    yield from ((section, [0], CORE) for section in of_four)
    yield from ((adamw, [seed], (*STATED, *LOW_RANK)) for seed in range(3))
    yield from ((section, [seed], CORE) for seed in range(1, 5) for section in of_four)
    yield from ((section, [seed], (*STATED, *LOW_RANK)) for seed in range(5) for section in of_two)
    yield from ((adamw, [seed], every) for seed in range(3))
    yield adamw_of_four, range(3), every
    yield SWEEP, [0], every
    yield FEEDBACK, [0], every
    yield STABLE, range(3), every
    for section in (*of_two, *of_four, *DEFAULT_SECTIONS, SHARDED_SECTION, STABLE, *FIRST_SECTIONS):
        yield section, range(section.seeds), every


def all_runs() -> Iterator[Run]:
    """Every run once: whatever is there when the training is interrupted makes a page."""
    seen = set()
    for section, seeds, beginnings in in_order():
        for seed in seeds:
            for row in section.rows:
                run = section.run(row, seed)
                if row.label.startswith(beginnings) and run.name not in seen:
                    seen.add(run.name)
                    yield run
