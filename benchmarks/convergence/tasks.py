# SPDX-License-Identifier: Apache-2.0
"""What is learnt: images of clothes by a convolutional network, licence texts and a dictionary by transformers."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
import sys
import tempfile
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

LICENCES = Path("/usr/share/common-licenses")  # of the package base-files, which every Debian and Ubuntu has
TRAINING_TEXTS = (
    *("Apache-2.0", "BSD", "CC0-1.0", "GFDL-1.2", "GFDL-1.3", "GPL-1", "GPL-2", "GPL-3"),
    *("LGPL-2", "LGPL-2.1", "LGPL-3", "MPL-1.1"),
)
# Whole licences, of which none is the next version of one learnt from but MPL-2.0, a text written anew.
VALIDATION_TEXTS = ("Artistic", "MPL-2.0")

# The Free On-line Dictionary of Computing: 5.6 MB of English prose, in Debian's and Ubuntu's package dict-foldoc.
DICTIONARY_PACKAGE = "dict-foldoc=20230119-1"
DICTIONARY_FILE = "foldoc.dict.dz"  # a gzip file; in the package it lies in usr/share/dictd
DICTIONARY_SHA256 = "c2dfea8326f0adb810f3624a8c0de234134c927434fb74737275719b0085a1be"  # of the unpacked text
PIECE = 4096  # bytes; of so many pieces one is held out:
HELD_OUT = 64


@dataclass
class Task(ABC):
    """A model, its data and what it is judged by. All ranks see one order of the data and take turns in each batch."""

    name: str
    title: str
    epochs: int
    batch: int  # examples a step, over all ranks
    rates: dict[str, float]  # optimizer -> the highest learning rate of the schedule
    qualities: ClassVar[tuple[str, ...]]  # what `judge` finds; by the first, a loss, algorithms are compared

    @property
    @abstractmethod
    def examples(self) -> int:
        """How many examples an epoch has."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read the data from the folder, or end the program with a sentence that says how to get it."""

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
        """Return the sum of each quality over this rank's share of the held-out data, and last its size."""

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

    qualities = ("test loss", "test accuracy")
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
        total = torch.tensor([0.0, 0.0, len(labels)], dtype=torch.float64)
        for x, y in zip(images.tensor_split(10), labels.tensor_split(10), strict=True):
            scores = network(x)
            total[0] += cross_entropy(scores, y, reduction="sum")
            total[1] += (scores.argmax(1) == y).sum()
        return total


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
    """Predicts the next byte at every position, of a text of `symbols` different ones."""

    def __init__(self, symbols: int, width: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(symbols, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.last_norm = nn.LayerNorm(width)
        self.predict = nn.Linear(width, symbols)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions[: text.shape[1]]
        scores: Tensor = self.predict(self.last_norm(self.blocks(x)))
        return scores


@dataclass
class LanguageModel(Task):
    """A transformer on the bytes of a text."""

    qualities = ("validation loss",)
    context: int = 64
    width: int = 96
    heads: int = 4
    layers: int = 2
    symbols: int = field(init=False, default=0)
    training: Tensor = field(init=False, repr=False)
    validation: Tensor = field(init=False, repr=False)
    digest: str = field(init=False, default="")

    @abstractmethod
    def texts(self, folder: Path) -> tuple[bytes, bytes]:
        """Return the text to learn and the text to judge by."""

    @property
    def examples(self) -> int:
        return len(self.training)

    def load(self, folder: Path) -> None:
        training, validation = self.texts(folder)
        self.digest = hashlib.sha256(training + validation).hexdigest()
        symbols = sorted(set(training + validation))
        self.symbols = len(symbols)
        numbers = torch.zeros(256, dtype=torch.int64)
        numbers[symbols] = torch.arange(len(symbols))
        self.training, self.validation = (self._windows(numbers, text) for text in (training, validation))

    def _windows(self, numbers: Tensor, text: bytes) -> Tensor:
        """Pieces of `context` bytes, each with the first byte of the next one as its last target."""
        return numbers[torch.tensor(list(text))].unfold(0, self.context + 1, self.context).contiguous()

    def network(self) -> nn.Module:
        return Transformer(self.symbols, self.width, self.heads, self.layers, self.context)

    def pick(self, chosen: Tensor) -> Batch:
        windows = self.training[chosen]
        return windows[:, :-1], windows[:, 1:]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def judge(self, network: nn.Module, rank: int, ranks: int) -> Tensor:
        windows = self.validation[rank::ranks]
        total = torch.tensor([0.0, windows[:, 1:].numel()], dtype=torch.float64)
        for part in windows.tensor_split(max(1, len(windows) // 16)):
            scores = network(part[:, :-1])
            total[0] += cross_entropy(scores.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
        return total


@dataclass
class Licences(LanguageModel):
    """The licences on every Debian system; two of them are held out."""

    def texts(self, folder: Path = LICENCES) -> tuple[bytes, bytes]:
        missing = [name for name in TRAINING_TEXTS + VALIDATION_TEXTS if not (folder / name).is_file()]
        if missing:
            sys.exit(
                f"{folder} lacks {', '.join(missing)}, which Debian and Ubuntu have: name a folder that holds them "
                "with --licences DIR."
            )
        training, validation = (
            b"".join((folder / name).read_bytes() for name in names) for names in (TRAINING_TEXTS, VALIDATION_TEXTS)
        )
        return training, validation


@dataclass
class Dictionary(LanguageModel):
    """The Free On-line Dictionary of Computing, of which one piece in `HELD_OUT` is held out."""

    length: int = 400  # steps, less than an epoch

    @property
    def steps(self) -> int:
        return self.length

    def texts(self, folder: Path) -> tuple[bytes, bytes]:
        path = folder / DICTIONARY_FILE
        if not path.is_file():
            fetch_dictionary(path)
        text = gzip.decompress(path.read_bytes())
        if hashlib.sha256(text).hexdigest() != DICTIONARY_SHA256:
            sys.exit(f"{path} is not that of {DICTIONARY_PACKAGE}: its text has another checksum.")
        pieces = [text[begin : begin + PIECE] for begin in range(0, len(text), PIECE)]
        held_out = pieces[HELD_OUT - 1 :: HELD_OUT]
        del pieces[HELD_OUT - 1 :: HELD_OUT]
        return b"".join(pieces), b"".join(held_out)


def fetch_dictionary(path: Path) -> None:
    """Take the dictionary out of its package, which apt downloads and nobody installs."""
    advice = (
        f"put {path.name} of Debian's package {DICTIONARY_PACKAGE} into {path.parent}, or name its folder with "
        "--dictionary DIR."
    )
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        sys.exit(f"There is no apt to download with: {advice}")
    with tempfile.TemporaryDirectory() as folder:
        # apt's own user may not write here; it says so, and goes on.
        fetched = subprocess.run(["apt-get", "download", "-qq", DICTIONARY_PACKAGE], cwd=folder, check=False)
        packages = list(Path(folder).glob("*.deb"))
        if fetched.returncode or not packages:
            sys.exit(f"apt-get could not download {DICTIONARY_PACKAGE} (apt-get update may help): {advice}")
        subprocess.run(["dpkg-deb", "-x", packages[0], folder], check=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(folder, "usr/share/dictd", DICTIONARY_FILE), path)
