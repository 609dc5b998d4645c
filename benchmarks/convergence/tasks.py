# SPDX-License-Identifier: Apache-2.0
"""What is learnt: images of clothes by a convolutional network, and licence texts by a transformer."""

from __future__ import annotations

import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from fashion_mnist import DATA, load, mirror_half, residual_network
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

Batch = tuple[Tensor, Tensor]

TEXTS = Path("/usr/share/common-licenses")  # Debian's and Ubuntu's package base-files, which every system of theirs has
TRAINING_TEXTS = (
    *("Apache-2.0", "BSD", "CC0-1.0", "GFDL-1.2", "GFDL-1.3", "GPL-1", "GPL-2", "GPL-3"),
    *("LGPL-2", "LGPL-2.1", "LGPL-3", "MPL-1.1"),
)
# Whole licences, of which none is the next version of one learnt from but MPL-2.0, a text written anew.
VALIDATION_TEXTS = ("Artistic", "MPL-2.0")


@dataclass
class Task(ABC):
    """A model, its data and what it is judged by. All ranks see one order of the data and take turns in each batch."""

    name: str
    title: str
    quality: str
    epochs: int
    batch: int  # examples a step, over all ranks
    rates: dict[str, float]  # optimizer -> the highest learning rate of the schedule
    better: ClassVar[str]  # "higher" or "lower": which quality

    @property
    @abstractmethod
    def examples(self) -> int:
        """How many examples an epoch has."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read the data, or end the program with a sentence that says how to get it."""

    @abstractmethod
    def network(self) -> nn.Module:
        """Return the model with weights drawn from torch's generator."""

    @abstractmethod
    def pick(self, chosen: Tensor) -> Batch:
        """Return the training examples of these numbers."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean training loss of a batch."""

    @abstractmethod
    def judge(self, network: nn.Module, rank: int, ranks: int) -> Tensor:
        """Return sum and count of the quality over this rank's share of the held-out data."""

    @property
    def steps(self) -> int:
        return self.epochs * (self.examples // self.batch)

    def batches(self, seed: int, rank: int, ranks: int) -> Iterator[Batch]:
        shuffle = torch.Generator().manual_seed(seed)
        for _ in range(self.epochs):
            order = torch.randperm(self.examples, generator=shuffle)
            for chosen in order[: self.steps // self.epochs * self.batch].view(-1, self.batch):
                yield self.pick(chosen[rank::ranks])


@dataclass
class FashionMnist(Task):
    """The network and the images of examples/fashion_mnist.py: the first `images` of the 60,000."""

    better = "higher"
    images: int = 60_000
    data: tuple[Tensor, Tensor, Tensor, Tensor] = field(init=False, repr=False)

    @property
    def examples(self) -> int:
        return self.images

    def load(self, folder: Path = DATA) -> None:
        self.data = load(folder, torch.device("cpu"))

    def network(self) -> nn.Module:
        return residual_network()

    def pick(self, chosen: Tensor) -> Batch:
        return mirror_half(self.data[0][chosen]), self.data[1][chosen]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)

    def judge(self, network: nn.Module, rank: int, ranks: int) -> Tensor:
        images, labels = self.data[2][rank::ranks], self.data[3][rank::ranks]
        parts = zip(images.tensor_split(10), labels.tensor_split(10), strict=True)
        right = sum((network(x).argmax(1) == y).sum() for x, y in parts)
        return torch.tensor([float(right), float(len(labels))], dtype=torch.float64)


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a layer norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.before_feed_forward = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        examples, length, width = x.shape
        projected = self.queries_keys_values(self.before_attention(x))
        q, k, v = projected.view(examples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).reshape(examples, length, width))
        x = x + self.feed_forward(self.before_feed_forward(x))
        return x


class Transformer(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(self, width: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.last_norm = nn.LayerNorm(width)
        self.predict = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions[: text.shape[1]]
        scores: Tensor = self.predict(self.last_norm(self.blocks(x)))
        return scores


@dataclass
class LanguageModel(Task):
    """Bytes of the licences on every Debian system; two licences are held out."""

    better = "lower"
    context: int = 64
    width: int = 96
    heads: int = 4
    layers: int = 2
    training: Tensor = field(init=False, repr=False)
    validation: Tensor = field(init=False, repr=False)
    digest: str = field(init=False, default="")

    @property
    def examples(self) -> int:
        return len(self.training)

    def load(self, folder: Path = TEXTS) -> None:
        missing = [name for name in TRAINING_TEXTS + VALIDATION_TEXTS if not (folder / name).is_file()]
        if missing:
            sys.exit(
                f"{folder} lacks {', '.join(missing)}, which Debian and Ubuntu have: name a folder that holds them "
                "with --texts DIR."
            )
        training, validation = (
            b"".join((folder / name).read_bytes() for name in names) for names in (TRAINING_TEXTS, VALIDATION_TEXTS)
        )
        self.digest = hashlib.sha256(training + validation).hexdigest()
        self.training, self.validation = self._windows(training), self._windows(validation)

    def _windows(self, text: bytes) -> Tensor:
        """Pieces of `context` bytes, each with the first byte of the next one as its last target."""
        return torch.tensor(list(text)).unfold(0, self.context + 1, self.context).contiguous()

    def network(self) -> nn.Module:
        return Transformer(self.width, self.heads, self.layers, self.context)

    def pick(self, chosen: Tensor) -> Batch:
        windows = self.training[chosen]
        return windows[:, :-1], windows[:, 1:]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def judge(self, network: nn.Module, rank: int, ranks: int) -> Tensor:
        windows = self.validation[rank::ranks]
        losses = cross_entropy(network(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten(), reduction="sum")
        return torch.tensor([float(losses), float(windows[:, 1:].numel())], dtype=torch.float64)
