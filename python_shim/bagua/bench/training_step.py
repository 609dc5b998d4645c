# SPDX-License-Identifier: Apache-2.0
"""A training step without arithmetic: what is left is what an algorithm does, as a user gets it.

A DistributedDataParallel model with one parameter, whose gradient is given instead of computed. A step is forward,
backward and optimizer, each of which may be the moment at which an algorithm communicates.
"""
# No `from __future__ import annotations`: see _hooks.py.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import bagua
from bagua._registry import describe
from bagua.bench.collectives import Place

# The warm-up of "qadam"; what is timed comes after.
_QADAM_WARMUP = 2
_WEIGHTS_SEED, _GRADIENTS_SEED = 1000, 2000
# A value of a chunk is off by at most half a step of its 255 (the largest difference is the whole tensor's).
_QUANTISATION = 1 / 510


class _Given(torch.autograd.Function):
    """A loss whose gradient is known."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> Any:
        return ctx.saved_tensors[0], None


class _OneParameter(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, gradient: Tensor) -> Tensor:
        return _Given.apply(self.weight, gradient)  # type: ignore[no-any-return]


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


class TrainingStep:
    """Steps of a model that communicates in DDP's own way, or with an algorithm."""

    def __init__(self, place: Place, register: Callable[..., Any] | None = None, optimizer_class: str = "") -> None:
        self.place = place
        self._kind = optimizer_class
        self._gradient = _noise(_GRADIENTS_SEED + place.rank, place).to(place.device)
        network = _OneParameter(_noise(_WEIGHTS_SEED, place).to(place.device))
        self._weight = network.weight
        # The gradient is copied into DDP's bucket, once, and not back.
        self._ddp = DistributedDataParallel(network, process_group=place.group, gradient_as_bucket_view=True)
        self._optimizer: Optimizer = _NoStep(network.parameters())
        if optimizer_class == "QAdamOptimizer":
            self._optimizer = bagua.QAdamOptimizer(network.parameters(), warmup_steps=_QADAM_WARMUP)
        self.handle = register(self._ddp, self._optimizer) if register else None
        self._steps = 0
        # Other weights on each rank, where that is what an algorithm works on.
        if optimizer_class == "Optimizer":
            with torch.no_grad():
                self._weight.copy_(_noise(_WEIGHTS_SEED + place.rank, place))
        self._start = self._weight.detach().clone()
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
        self._optimizer.step()
        self._steps += 1

    def wire_bytes(self) -> int | None:
        """Return the bytes that this rank has sent so far, where that is known."""
        return None if self.handle is None else int(self.handle.stats()["wire_bytes"])

    def check(self) -> str:
        """Take another step and return "" where its result is right. Collective."""
        if self._kind == "Optimizer":
            return self._check_weights()
        momentum = torch.zeros(())
        share = 1.0
        if self._kind == "QAdamOptimizer":
            share = 1 - self._optimizer.param_groups[0]["betas"][0]
            momentum = self._optimizer.state[self._weight]["exp_avg"].detach().clone().cpu().double() * (1 - share)
        before = self.wire_bytes()
        self.step()
        sent = None if before is None else (self.wire_bytes() or 0) - before
        mean, widest = torch.zeros(self.place.count, dtype=torch.float64), 0.0
        for rank in range(self.place.ranks):
            own = momentum + share * _noise(_GRADIENTS_SEED + rank, self.place).double()
            mean += own / self.place.ranks
            widest = max(widest, (own.max() - own.min()).item())
        assert self._weight.grad is not None
        off = (self._weight.grad.cpu().double() - mean).abs().max().item()
        # What sends less than an allreduce of all bits has coded the values twice: each rank's, then their mean.
        least = self.bus_factor(self.place.ranks) * self.place.count * self.place.dtype.itemsize
        is_coded = sent is not None and sent < 0.99 * least
        bound = self._rounding() + (2 * _QUANTISATION * widest if is_coded else 0.0)
        return "" if off <= bound else f"the mean is off by {off:.2g}, expected at most {bound:.2g}"

    def _rounding(self) -> float:
        # Values are below 8 (normal ones); a few roundings of them on the way.
        return 8 * (self.place.ranks + 2) * torch.finfo(self.place.dtype).eps

    def _check_weights(self) -> str:
        """Ranks come closer to each other, around the mean that they began with unless an outer optimizer moves it."""
        self.step()
        assert self.handle is not None
        if describe(self.handle.algorithm)["runs_in_background"]:
            self.handle.abort()
        begin, end = self._start.double(), self._weight.detach().double()
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


def algorithm(name: str, options: dict[str, Any]) -> Callable[[Place], TrainingStep]:
    """Return what makes the steps of an algorithm."""

    def register(ddp: DistributedDataParallel, optimizer: Optimizer) -> Any:
        return bagua.register_comm_hook(ddp, name, optimizer, **options)

    return lambda place: TrainingStep(place, register, describe(name)["optimizer"])
