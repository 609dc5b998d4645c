# SPDX-License-Identifier: Apache-2.0
"""Models and training loops for the tests of communication hooks. Used inside ranks."""

import copy
import io
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import bagua
import torch
import torch.distributed as dist
from devices import STOCK_BACKEND, here, randn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

Gradients = dict[str, Tensor | None]
Register = Callable[[DDP], Any]


class Leaves(nn.Module):
    """Its gradients are the tensors that forward() is given, whatever its weights are; without one they are unused."""

    def __init__(
        self,
        *shapes: int | Sequence[int],
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        super().__init__()
        zeros = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        # Only images have channels.
        self.leaves = nn.ParameterList(z.to(memory_format=memory_format) if z.dim() == 4 else z for z in zeros)

    def forward(self, gradients: Sequence[Tensor | None]) -> Tensor:
        pairs = zip(self.leaves, gradients, strict=True)
        return torch.stack([(leaf * given).sum() for leaf, given in pairs if given is not None]).sum()


def random_gradient(length: int, rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Neither centred on zero nor of the same size on two ranks or in two steps."""
    with torch.device("cpu"):
        drawn = randn(length, seed=7919 * step + 31 * rank + length)
        # Rounded where it was drawn, so that every device has the same bits.
        given = ((drawn + 0.3 * rank) * 10.0 ** (step - 1)).to(dtype)
    return here(given)


def perceptron() -> nn.Module:
    """Its small buckets (see SMALL_BUCKETS) are of several lengths that are odd or no multiple of three."""
    with torch.device("cpu"):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(23, 41), nn.ReLU(), nn.Linear(41, 29), nn.ReLU(), nn.Linear(29, 7))
    return model.to(torch.get_default_device())


# Several buckets for perceptron(), from the second step on.
SMALL_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.0001}


Loss = Callable[[nn.Module, int], Tensor]


def loss_of(model: nn.Module, step: int) -> Tensor:
    return _loss_of(model, step, dist.get_rank())


def mean_loss_of(model: nn.Module, step: int) -> Tensor:
    """Of the batches of all ranks, in one process."""
    return torch.stack([_loss_of(model, step, rank) for rank in range(dist.get_world_size())]).mean()


def _loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    loss: Tensor = model(randn(6, 23, seed=1000 * step + rank)).square().mean()
    return loss


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], loss: Loss = loss_of) -> None:
    """Of plain training, numbered."""
    for number in steps:
        optimizer.zero_grad()
        loss(model, number).backward()
        optimizer.step()


def optimizer_for(algorithm: str, model: nn.Module, warmup: int = 2, lr: float = 0.05) -> torch.optim.Optimizer:
    """SGD, or what qadam needs."""
    if bagua.describe(algorithm)["optimizer"] == "QAdamOptimizer":
        return bagua.QAdamOptimizer(model.parameters(), lr=1e-3, warmup_steps=warmup)
    return torch.optim.SGD(model.parameters(), lr=lr)


def gradients_of(ddp: DDP) -> Gradients:
    """Copies; sparse ones made dense."""
    return {name: None if p.grad is None else p.grad.to_dense().clone() for name, p in ddp.module.named_parameters()}


def reduced(ddp: DDP, gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """What becomes of the gradients of a model of Leaves."""
    ddp.zero_grad()
    ddp(gradients).backward()
    return [p.grad.detach().clone() for p in ddp.parameters() if p.grad is not None]


def train(
    model: nn.Module,
    register: Register,
    steps: int = 3,
    loss: Loss = loss_of,
    learning_rate: float = 0.05,
    **ddp_options: Any,
) -> list[Gradients]:
    """The gradients of every step, and last of all the weights."""
    ddp = DDP(copy.deepcopy(model), **ddp_options)
    register(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=learning_rate)
    history: list[Gradients] = []
    for step in range(steps):
        optimizer.zero_grad()
        loss(ddp, step).backward()
        history.append(gradients_of(ddp))
        optimizer.step()
    return [*history, {name: p.detach().clone() for name, p in ddp.module.named_parameters()}]


def with_hook(name: str, **options: Any) -> Register:
    return lambda ddp: bagua.register_comm_hook(ddp, name, **options)


def train_without_bagua(model: nn.Module, **options: Any) -> list[Gradients]:
    """As train(), on a group of torch's own."""
    with new_group(backend=STOCK_BACKEND) as group:
        return train(model, lambda ddp: None, process_group=group, **options)


class Spy:
    """Stands between DDP and a hook: what each bucket was, and what became of it."""

    def __init__(self, name: str, **options: Any) -> None:
        self.state, self.hook = bagua.comm_hook(name, **options)
        self.given: list[Tensor] = []
        self.results: list[Tensor] = []

    def register(self, ddp: DDP) -> None:
        ddp.register_comm_hook(self, _run_watched)


def _run_watched(spy: Spy, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    place = len(spy.given)
    spy.given.append(bucket.buffer().clone())
    # Callbacks of several buckets come in any order.
    spy.results.append(torch.empty(0))

    def keep(future: torch.futures.Future[torch.Tensor]) -> Tensor:
        result: Tensor = future.value()
        spy.results[place] = result.clone()
        return result

    return spy.hook(spy.state, bucket).then(keep)


@contextmanager
def new_group(**options: Any) -> Iterator[dist.ProcessGroup]:
    group = dist.new_group(**options)
    assert group is not None
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


@contextmanager
def logged(name: str = "bagua") -> Iterator[io.StringIO]:
    """What a logger is given."""
    text = io.StringIO()
    logging.getLogger(name).addHandler(handler := logging.StreamHandler(text))
    try:
        yield text
    finally:
        logging.getLogger(name).removeHandler(handler)


@contextmanager
def captured_stderr() -> Iterator[Callable[[], str]]:
    """Give a function that returns what this process, C++ included, has written there so far."""
    with tempfile.TemporaryFile("w+") as captured:
        usual = os.dup(2)
        os.dup2(captured.fileno(), 2)

        def text() -> str:
            # Not by the descriptor that is written to, whose place would move.
            return Path(f"/proc/self/fd/{captured.fileno()}").read_text()

        try:
            yield text
        finally:
            os.dup2(usual, 2)
            os.close(usual)


@contextmanager
def emulated_hosts(hosts: str) -> Iterator[dist.ProcessGroup]:
    """A group in which rank r is on host hosts[r]."""
    with mock.patch.dict(os.environ, BAGUA_HOST_ID=hosts[dist.get_rank()]), new_group() as group:
        yield group


def everywhere(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """That of each rank."""
    copies = [torch.empty_like(tensor).contiguous() for _ in range(dist.get_world_size(group))]
    dist.all_gather(copies, tensor.detach().contiguous(), group=group)
    return copies


def same_everywhere(*tensors: Tensor, group: dist.ProcessGroup | None = None) -> bool:
    """Whether all ranks hold the same bits of them."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return all(torch.equal(copy, flat) for copy in everywhere(flat, group))


def same(one: Any, other: Any) -> bool:
    """Whether two structures of tensors are equal to the bit."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
