# SPDX-License-Identifier: Apache-2.0
"""What decides the result of a run: a task, the number of ranks, how they communicate (a row of a table), a seed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tasks import Dictionary, FashionMnist, Licences, Task
from torch import Tensor

QADAM_WARMUP = 4  # one step in so many is warm-up
POWER_SGD_WARMUP = 10  # for torch's hook and ours
SYNC_INTERVAL_MS = 5  # less than a step takes, so that nearly every step can start a round
TORCHS_POWER_SGD = "torch's powerSGD_hook"
SHARDED = "fully_shard"

# All ranks share a host, inside which nothing is compressed unless it is asked for.
FLAT: dict[str, Any] = {"hierarchical": False}


@dataclass(frozen=True)
class Row:
    """A line of a table: how gradients or weights are exchanged, and what steps."""

    label: str
    optimizer: str  # "SGD", "Adam", "AdamW" or "QAdam"
    algorithm: str | None = None  # None: DistributedDataParallel without a hook
    options: dict[str, Any] = field(default_factory=dict)
    family: str = ""  # a column of the figure
    rate: float | None = None  # the highest learning rate; None: the task's
    as_given: bool = False  # other options have their defaults of the day, and not those of the first records

    @property
    def baseline(self) -> Row:
        """What it is compared to: the same optimizer without a hook, at the task's rate; that of QAdam is Adam."""
        return baseline(self.optimizer.removeprefix("Q"))


@dataclass(frozen=True)
class Section:
    """A table: rows trained on one task by the same number of ranks."""

    name: str
    task: Task
    ranks: int
    rows: tuple[Row, ...]
    seeds: int = 5
    about: str = ""

    @property
    def title(self) -> str:
        return f"{self.task.title}, {self.ranks} ranks{self.about}"

    def run(self, row: Row, seed: int) -> Run:
        return Run(self.task, self.ranks, row, seed)


@dataclass(frozen=True)
class Run:
    task: Task
    ranks: int
    row: Row
    seed: int

    @property
    def name(self) -> str:
        label = self.row.label.lower().replace(", ", "-").replace(" ", "_").replace("'", "")
        rate = "" if self.row.rate is None else f"-rate_{self.row.rate:g}"
        return f"{self.task.name}-{self.ranks}_ranks-{label}-{self.row.optimizer.lower()}{rate}-{self.seed}"

    @property
    def rate(self) -> float:
        return self.row.rate or self.task.rates[self.row.optimizer.removeprefix("Q")]

    @property
    def qadam_warmup(self) -> int:
        return self.task.steps // QADAM_WARMUP

    @property
    def measures_codecs(self) -> bool:
        """Whether the gradients of this run are coded by every codec, for the table of their errors."""
        row = self.row
        is_baseline = row.algorithm is None and row.optimizer == "AdamW" and row.rate is None
        return is_baseline and self.ranks == 2 and self.seed == 0

    @property
    def baseline(self) -> Run:
        return replace(self, row=self.row.baseline)

    def settings(self) -> dict[str, Any]:
        """Everything that decides the result, but for the program itself."""
        task = {
            key: value
            for key, value in vars(self.task).items()
            if key not in ("title", "rates") and not isinstance(value, (Tensor, tuple))
        }
        row = {key: value for key, value in asdict(self.row).items() if key not in ("label", "family", "rate")}
        if not row["as_given"]:
            del row["as_given"]
        warmup = {"qadam_warmup": self.qadam_warmup} if self.row.optimizer == "QAdam" else {}
        return {"task": task, "ranks": self.ranks, "row": row, "rate": self.rate, "seed": self.seed, **warmup}


FASHION_MNIST = FashionMnist(
    name="fashion_mnist",
    title="Fashion-MNIST, residual network",
    epochs=3,
    batch=128,
    rates={"SGD": 0.2, "Adam": 0.006, "AdamW": 0.006},
    images=20_480,
)
LICENCES = Licences(
    name="language_model",
    title="Licence texts, transformer",
    epochs=4,
    batch=16,
    rates={"Adam": 0.008},
)
DICTIONARY = Dictionary(
    name="dictionary",
    title="Dictionary, transformer",
    epochs=1,
    batch=8,
    rates={"SGD": 0.2, "AdamW": 0.001},
    width=256,
    layers=4,
)
TASKS = (FASHION_MNIST, LICENCES, DICTIONARY)


def baseline(optimizer: str, rate: float | None = None) -> Row:
    return Row("DDP without a hook", optimizer, rate=rate)
