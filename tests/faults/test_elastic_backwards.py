# SPDX-License-Identifier: Apache-2.0
"""bagua.elastic: a backward that ends between two of its buckets, by an error of the user's code, then by a death."""

import contextlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import bagua
import pytest
import torch
import torch.distributed as dist
from elastic_ranks import backward, join, weights_of
from hooked_models import same_everywhere
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from trouble import die, meet

pytestmark = pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has reconfigure from 2.14 on")
SIZE = 3
LAST = SIZE - 1
STEPS = 12
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


def _train(kind: str) -> tuple[Tensor, int, list[float]]:
    """Return the weights, the steps, and how long each disturbed one took with all that followed of it."""
    algorithm, options, finds_unused = KINDS[kind]
    me, shared, members = join(at_least=SIZE)
    network, seconds = _Parted(), []

    def fail() -> None:
        if me == LAST:
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
        to_come = {STEPS // 3: fail, 2 * STEPS // 3: lambda: time.sleep(PAUSE)}
        begun: dict[int, float] = {}
        while training.step < STEPS:
            step = training.step
            with contextlib.suppress(KeyError), training.attempt():
                if step in to_come:
                    network.between = to_come.pop(step)
                    begun[step] = time.monotonic()
                    if not to_come:
                        assert same_everywhere(weights_of(training))
                        meet(shared, "compared", SIZE)  # the others hear of the death in their backward
                        if me == LAST:
                            die(shared)
                backward(training)
                optimizer.step()
                optimizer.zero_grad()
            network.between = lambda: None
            if step in begun and training.step > step:
                seconds.append(time.monotonic() - begun.pop(step))
        training.wait_for_end()
        training.handle.synchronize()
    meet(shared, "over", SIZE - 1)  # the first one serves the store
    return weights_of(training), training.step, seconds


@pytest.mark.parametrize("kind", KINDS)
def test_what_ends_a_backward_between_two_buckets_costs_one_step(kind: str) -> None:
    *results, _ = run_ranks(SIZE, _train, kind, dying={LAST})
    for weights, steps, seconds in results:
        assert torch.equal(weights, results[0][0])
        assert steps == STEPS
        assert len(seconds) == 2
        assert max(seconds) < 12
