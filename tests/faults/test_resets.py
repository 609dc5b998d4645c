# SPDX-License-Identifier: Apache-2.0
"""Connections that are reset at random moments cost time, and nothing else: the weights are the same to the bit."""

import hashlib
import random
import threading
from collections.abc import Sequence

import bagua
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from reset_connections import reset_connections
from torch.nn.parallel import DistributedDataParallel as DDP
from trouble import TAKES_ALL, selection

SIZE = 3
STEPS = 20 if TAKES_ALL else 10
# Resets that a training has lived through before it may end.
LEAST_RESETS = 15
# Each rank on a host of its own, or two of them beside each other.
HOSTS: dict[str, Sequence[str]] = {"apart": ["a", "b", "c"], "uneven": ["a", "a", "b"]}


class _Trouble(threading.Thread):
    """Resets one of this process's connections, or all, again and again."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.resets = 0
        self._is_over = threading.Event()
        self._random = random.Random(dist.get_rank())

    def run(self) -> None:
        while not self._is_over.wait(self._random.uniform(0.0, 0.06)):
            left = self._random.choice((1, 1_000))

            def is_chosen(_own: int, _peer: int) -> bool:
                nonlocal left
                left -= 1
                return left >= 0

            self.resets += reset_connections(is_chosen)

    def end(self) -> None:
        self._is_over.set()
        self.join()


def _train(algorithm: str, is_in_trouble: bool) -> tuple[str, int]:
    """Return a digest of the weights after STEPS steps, and how many connections were reset meanwhile."""
    torch.manual_seed(0)
    ddp = DDP(torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(6))), bucket_cap_mb=0.5)
    handle = bagua.register_comm_hook(ddp, algorithm)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    trouble = _Trouble()
    if is_in_trouble:
        trouble.start()
    for _ in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.randn(8, 300, generator=generator)).square().mean().backward()
        optimizer.step()
    # All sizes, and messages beside them.
    sums = []
    resets = torch.zeros(1)
    while True:
        for numel in (1, 5_000, 500_000):
            tensor = torch.full((numel,), float(dist.get_rank() + 1))
            dist.all_reduce(tensor)
            sums.append(tensor[[0, -1]].tolist())
        message = torch.full((200_000,), float(dist.get_rank()))
        received = torch.empty_like(message)
        sent = dist.isend(message, (dist.get_rank() + 1) % SIZE)
        dist.recv(received, (dist.get_rank() - 1) % SIZE)
        assert sent is not None
        sent.wait()
        message.zero_()  # it has been given back
        assert received.eq((dist.get_rank() - 1) % SIZE).all()
        resets.fill_(float(trouble.resets))
        dist.all_reduce(resets)
        if not is_in_trouble or resets.item() >= LEAST_RESETS:
            break
    if is_in_trouble:
        trouble.end()
    assert all(value == [6.0, 6.0] for value in sums)
    digest = hashlib.sha256()
    for parameter in ddp.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    assert (handle.stats()["reconnections"] > 0) == is_in_trouble
    return digest.hexdigest(), int(resets.item())


def _train_twice(algorithm: str) -> list[tuple[str, int]]:
    return [_train(algorithm, is_in_trouble) for is_in_trouble in (False, True)]


@pytest.mark.parametrize(
    ("algorithm", "hosts", "secret"),
    selection(
        [(name, hosts, secret) for name in ("gradient_allreduce", "bytegrad") for hosts in HOSTS for secret in (0, 1)],
        [pytest.param("gradient_allreduce", "apart", 0, marks=pytest.mark.long), ("bytegrad", "uneven", 1)],
    ),
)
def test_a_training_whose_connections_are_reset_ends_with_the_same_bits(
    algorithm: str, hosts: str, secret: int
) -> None:
    env: dict[str, str | Sequence[str]] = {"BAGUA_HOST_ID": HOSTS[hosts]}
    if secret:
        env["BAGUA_JOB_SECRET"] = "the secret of this test"
    results = run_ranks(SIZE, _train_twice, algorithm, env=env)
    assert len({digest for trainings in results for digest, _ in trainings}) == 1
    assert min(resets for _, (_, resets) in results) >= LEAST_RESETS
