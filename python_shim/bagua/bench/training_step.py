# SPDX-License-Identifier: Apache-2.0
"""A training step without arithmetic of its own: what is left is what an algorithm does, as a user gets it.

A DistributedDataParallel model with one parameter, or with those of a real model, whose gradients are given instead of
computed. A step is forward, backward and optimizer, each of which may be the moment at which an algorithm communicates.
"""
# No `from __future__ import annotations`: see _hooks.py.

import hashlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import bagua
from bagua._message_bytes import Parameter
from bagua._registry import describe
from bagua._tensors_apart import gathered
from bagua.bench.collectives import Place
from bagua.bench.cost_model import OPTIMIZER
from bagua.bench.given_gradients import GivenGradients
from bagua.bench.shapes import Shapes

# The warm-up of "qadam"; what is timed comes after.
_QADAM_WARMUP = 2
_WEIGHTS_SEED, _GRADIENTS_SEED = 1000, 2000
# A value of a chunk is off by at most half a step of its 255 (the largest difference is the whole tensor's).
_QUANTISATION = 1 / 510


class _NoStep(Optimizer):
    """Leaves the weights alone, so that what becomes of them is the algorithm's work."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def _noise(seed: int, place: Place) -> Tensor:
    """Return normal values, the same for a seed anywhere."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(place.count, generator=generator).to(place.dtype)


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


class TrainingStep:
    """Steps of a model that communicates in DDP's own way, or with the algorithm that `register` registers.

    Without `shapes` the model is a vector of the place's count.
    """

    def __init__(
        self,
        place: Place,
        register: Callable[..., Any] | None = None,
        optimizer_class: str = "",
        shapes: Shapes | None = None,
    ) -> None:
        self.place = place
        self._kind = optimizer_class
        self._is_vector = shapes is None
        shapes = shapes or Shapes("vector", (Parameter("weight", (place.count,)),), None)
        compute = shapes.compute or 0.0
        self._optimizer_seconds = compute * OPTIMIZER
        self._gradient = _noise(_GRADIENTS_SEED + place.rank, place).to(place.device)
        network = GivenGradients(shapes.parameters, _noise(_WEIGHTS_SEED, place).to(place.device), compute)
        self._weights = network.given_weights
        # The gradient is copied into DDP's bucket, once, and not back.
        self._ddp = DistributedDataParallel(network, process_group=place.group, gradient_as_bucket_view=True)
        self._optimizer: Optimizer = _NoStep(network.parameters())
        if optimizer_class == "QAdamOptimizer":
            self._optimizer = bagua.QAdamOptimizer(network.parameters(), warmup_steps=_QADAM_WARMUP)
        self.handle = register(self._ddp, self._optimizer) if register else None
        self._steps = 0
        # Other weights on each rank, where that is what an algorithm works on.
        if optimizer_class == "Optimizer":
            sizes = [weight.numel() for weight in self._weights]
            own = torch.split(_noise(_WEIGHTS_SEED + place.rank, place), sizes)
            with torch.no_grad():
                for weight, part in zip(self._weights, own, strict=True):
                    weight.copy_(part.view_as(weight))
        self._start = _flat(self._weights)
        for _ in range(_QADAM_WARMUP + 1):  # DDP settles on its buckets, warm-ups end
            self.step()

    @staticmethod
    def bus_factor(ranks: int) -> float:
        """As of all_reduce, which every algorithm is an alternative to."""
        return 2 * (ranks - 1) / ranks

    def step(self) -> None:
        """Take one step."""
        self._optimizer.zero_grad()
        self._ddp(self._gradient).backward()
        if self._optimizer_seconds:
            time.sleep(self._optimizer_seconds)
        self._optimizer.step()
        self._steps += 1

    def wire_bytes(self) -> int | None:
        """Return the bytes that this rank has sent so far, where that is known."""
        return None if self.handle is None else int(self.handle.stats()["wire_bytes"])

    def check(self) -> str:
        """Take another step and return "" where its result is right. Collective."""
        if self._kind == "Optimizer":
            return self._check_weights()
        # How far off the mean may be is known for a vector, which is coded with 8 bits if at all.
        if not self._is_vector and self.handle is not None and self.handle.algorithm != "gradient_allreduce":
            return self._check_agreement()
        momentum = torch.zeros(())
        share = 1.0
        if self._kind == "QAdamOptimizer":
            share = 1 - self._optimizer.param_groups[0]["betas"][0]
            momenta = _flat(self._optimizer.state[weight]["exp_avg"] for weight in self._weights)
            momentum = momenta.cpu().double() * (1 - share)
        before = self.wire_bytes()
        self.step()
        sent = None if before is None else (self.wire_bytes() or 0) - before
        mean, widest = torch.zeros(self.place.count, dtype=torch.float64), 0.0
        for rank in range(self.place.ranks):
            own = momentum + share * _noise(_GRADIENTS_SEED + rank, self.place).double()
            mean += own / self.place.ranks
            widest = max(widest, (own.max() - own.min()).item())
        off = (self._gradients().cpu().double() - mean).abs().max().item()
        # What sends less than an allreduce of all bits has coded the values twice: each rank's, then their mean.
        least = self.bus_factor(self.place.ranks) * self.place.count * self.place.dtype.itemsize
        is_coded = sent is not None and sent < 0.99 * least
        bound = self._rounding() + (2 * _QUANTISATION * widest if is_coded else 0.0)
        return "" if off <= bound else f"the mean is off by {off:.2g}, expected at most {bound:.2g}"

    def _gradients(self) -> Tensor:
        return _flat(weight.grad for weight in self._weights if weight.grad is not None)

    def _check_agreement(self) -> str:
        """All ranks have the same gradients, to the bit, which are near those of all ranks."""
        self.step()
        gradients = self._gradients().cpu()
        digest = hashlib.sha256(gradients.view(torch.uint8).numpy().tobytes()).digest()
        digests = gathered(digest)
        others = [rank for rank, its_digest in enumerate(digests) if its_digest != digests[0]]
        if others:
            return f"ranks {others} have other gradients than rank 0"
        mean = sum(
            (_noise(_GRADIENTS_SEED + rank, self.place).double() for rank in range(self.place.ranks)), torch.zeros(())
        )
        product = gradients.double().dot(mean) / (gradients.double().norm() * mean.norm())
        # Not a number is no more than that, either.
        return "" if product > 0 else f"gradients are not those of all ranks: the cosine between them is {product:.2g}"

    def _rounding(self) -> float:
        # Values are below 8 (normal ones); a few roundings of them on the way.
        return 8 * (self.place.ranks + 2) * torch.finfo(self.place.dtype).eps

    def _check_weights(self) -> str:
        """Ranks come closer to each other, around the mean that they began with unless an outer optimizer moves it."""
        self.step()
        assert self.handle is not None
        if describe(self.handle.algorithm)["runs_in_background"]:
            self.handle.abort()
        begin, end = self._start.double(), _flat(self._weights).double()
        means = torch.stack([begin, end])
        dist.all_reduce(means)
        means /= self.place.ranks
        drift = (means[1] - means[0]).abs().max()
        spreads = torch.stack([(begin - means[0]).abs().max(), (end - means[1]).abs().max()])
        dist.all_reduce(spreads, dist.ReduceOp.MAX)
        first, last = spreads.tolist()
        # Each step may round towards one side, of the largest range of values that has been on the way.
        bound = self._steps * (_QUANTISATION * 4 * first + self._rounding())
        if drift.item() > bound and "outer_lr" not in self.handle.options:
            return f"the mean of the weights has moved by {drift.item():.2g}, expected at most {bound:.2g}"
        return "" if last < first else f"ranks are {last:.2g} from their mean, after {first:.2g} at the beginning"

    def close(self) -> None:
        """Let the algorithm go. Collective."""
        if self.handle is not None:
            self.handle.remove()


def algorithm(name: str, options: dict[str, Any], shapes: Shapes | None = None) -> Callable[[Place], TrainingStep]:
    """Return what makes the steps of an algorithm."""

    def register(ddp: DistributedDataParallel, optimizer: Optimizer) -> Any:
        return bagua.register_comm_hook(ddp, name, optimizer, **options)

    return lambda place: TrainingStep(place, register, describe(name)["optimizer"], shapes)
