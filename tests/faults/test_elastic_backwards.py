# SPDX-License-Identifier: Apache-2.0
"""bagua.elastic: a backward that ends between two of its buckets, by a death or by an error of the user's code."""

import contextlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import bagua
import pytest
import torch
import torch.distributed as dist
from elastic_ranks import join, weights_of
from holdings import wait_for
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from trouble import die

pytestmark = pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has reconfigure from 2.14 on")
SIZE = 3
LAST = SIZE - 1
STEPS = 10
# Seconds. A death is found in less, so that the next bucket meets a group that has failed already.
PAUSE = 0.8


class _Parted(nn.Module):
    """Two layers, between whose gradients something may happen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 3)
        self.between: Callable[[], None] = lambda: None

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.first(inputs)
        hidden.register_hook(lambda _: self.between())
        return self.second(hidden.relu())  # type: ignore[no-any-return]


class _Kind(NamedTuple):
    algorithm: str
    options: dict[str, Any]
    finds_unused: bool = False


KINDS = {
    "gradients": _Kind("bytegrad", {}),
    "with an optimizer": _Kind("qadam", {"hierarchical": False}),
    "inside a host": _Kind("local_sgd", {"hierarchical": True, "sync_every": 2}),
    "unused": _Kind("bytegrad", {}, finds_unused=True),
}


def _train(kind: str, disturbance: str) -> tuple[Tensor, int, float]:
    """Return the weights, the steps, and how long the disturbed one took with all that followed of it."""
    algorithm, options, finds_unused = KINDS[kind]
    me, shared, members = join(at_least=SIZE)
    network, begin, seconds = _Parted(), 0.0, 0.0

    def disturb() -> None:
        if disturbance == "error" and me == LAST:
            raise KeyError("of the user's hook")
        time.sleep(PAUSE)

    with members:
        ddp = DDP(network, bucket_cap_mb=0.001, find_unused_parameters=finds_unused)
        is_qadam = algorithm == "qadam"
        parameters = network.parameters()
        optimizer = (
            bagua.QAdamOptimizer(parameters, 0.01, 2, eps=0.1) if is_qadam else torch.optim.SGD(parameters, 0.05)
        )
        training = members.train(ddp, optimizer, algorithm, **options)
        members._group._meetings.at_least = 1
        is_over = False
        while training.step < STEPS:
            is_now = training.step == STEPS // 2 and not is_over
            with contextlib.suppress(KeyError), training.attempt():
                if is_now:
                    is_over, begin, network.between = True, time.monotonic(), disturb
                    if disturbance == "death" and me == LAST:
                        die(shared)
                generator = torch.Generator().manual_seed(100 * training.step + dist.get_rank())
                loss = ddp(torch.randn(4, 8, generator=generator)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            network.between = lambda: None
            if is_over and not seconds and training.step > STEPS // 2:
                seconds = time.monotonic() - begin
        training.wait_for_end()
        training.handle.synchronize()
    shared.add("over", 1)
    # The first one serves the store.
    assert me != 0 or wait_for(lambda: shared.add("over", 0) == SIZE - (disturbance == "death"), 30)
    return weights_of(training), training.step, seconds


@pytest.mark.parametrize("disturbance", ["death", "error"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_ends_a_backward_between_two_buckets_costs_one_step(kind: str, disturbance: str) -> None:
    dying = {LAST} if disturbance == "death" else ()
    results = run_ranks(SIZE, _train, kind, disturbance, dying=dying)
    results = results[:LAST] if dying else results
    for weights, steps, seconds in results:
        assert torch.equal(weights, results[0][0])
        assert steps == STEPS
        assert seconds < 12
