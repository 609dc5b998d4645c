# SPDX-License-Identifier: Apache-2.0
"""Which runs there are: sections (a task on a number of ranks), their rows, and what decides each result."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tasks import FashionMnist, LanguageModel, Task
from torch import Tensor

QADAM_WARMUP = 4  # one step in so many is warm-up
SYNC_INTERVAL_MS = 5  # less than a step takes, so that nearly every step can start a round

# All ranks share a host, inside which nothing is compressed unless it is asked for.
FLAT: dict[str, Any] = {"hierarchical": False}


@dataclass(frozen=True)
class Row:
    """A line of a table: how gradients or weights are exchanged, and what steps."""

    label: str
    optimizer: str  # "SGD", "Adam" or "QAdam"
    algorithm: str | None = None  # None: DistributedDataParallel without a hook
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """A table: rows trained on one task by the same number of ranks."""

    task: Task
    ranks: int
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        return f"{self.task.title}, {self.ranks} ranks"

    def baseline_of(self, row: Row) -> Row:
        """DistributedDataParallel without a hook, with the row's optimizer; that of QAdam is Adam."""
        optimizer = row.optimizer.removeprefix("Q")
        return next(r for r in self.rows if r.algorithm is None and r.optimizer == optimizer)


@dataclass(frozen=True)
class Run:
    task: Task
    ranks: int
    row: Row
    seed: int

    @property
    def name(self) -> str:
        label = self.row.label.lower().replace(", ", "-").replace(" ", "_")
        return f"{self.task.name}-{self.ranks}_ranks-{label}-{self.row.optimizer.lower()}-{self.seed}"

    @property
    def rate(self) -> float:
        return self.task.rates[self.row.optimizer.removeprefix("Q")]

    @property
    def qadam_warmup(self) -> int:
        return self.task.steps // QADAM_WARMUP

    def settings(self) -> dict[str, Any]:
        """Everything that decides the result, but for the program itself."""
        task = {key: value for key, value in vars(self.task).items() if not isinstance(value, (Tensor, tuple))}
        warmup = {"qadam_warmup": self.qadam_warmup} if self.row.optimizer == "QAdam" else {}
        return {"task": task, "ranks": self.ranks, "row": asdict(self.row), "seed": self.seed, **warmup}


FASHION_MNIST = FashionMnist(
    name="fashion_mnist",
    title="Fashion-MNIST, residual network",
    quality="test accuracy",
    epochs=3,
    batch=128,
    rates={"SGD": 0.2, "Adam": 0.006},
    images=20_480,
)
LANGUAGE_MODEL = LanguageModel(
    name="language_model",
    title="Licence texts, transformer",
    quality="validation loss (nats per byte)",
    epochs=4,
    batch=16,
    rates={"Adam": 0.008},
)


def baseline(optimizer: str) -> Row:
    return Row("DDP without a hook", optimizer)


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

SECTIONS = (
    Section(FASHION_MNIST, 2, (baseline("SGD"), *centralized("SGD"), *decentralized("SGD"), baseline("Adam"), *QADAM)),
    Section(LANGUAGE_MODEL, 2, (baseline("Adam"), *centralized("Adam"), *QADAM, *decentralized("Adam"))),
    # With two ranks every peer is the same one. What a rank hears from some of the others only shows from four on.
    Section(LANGUAGE_MODEL, 4, (baseline("Adam"), *decentralized("Adam"))),
)


def all_runs(seeds: int) -> list[Run]:
    return [
        Run(section.task, section.ranks, row, seed)
        for section in SECTIONS
        for row in section.rows
        for seed in range(seeds)
    ]
