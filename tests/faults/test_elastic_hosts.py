# SPDX-License-Identifier: Apache-2.0
"""bagua.elastic: hosts that are cut off from the others, and come back. On emulated hosts: needs root and iproute2."""

import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from bagua.bench.emulated_hosts import Host
from bagua.elastic import Training
from elastic_ranks import join, weights_of
from holdings import wait_for
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from trouble import meet
from two_hosts import hosts_over, set_link

pytestmark = [
    pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has reconfigure from 2.14 on"),
    pytest.mark.long,
]
SIZE = 3
LAST = SIZE - 1
SECONDS = 90.0
# Steps of a model this small would be thousands.
PAUSE = 0.1


def _wait_for_steps(shared: dist.Store, size: int) -> None:
    """Wait until the first rank has taken five more steps in a group of this size."""
    begun = shared.add(f"steps of 0 with {size}", 0)
    assert wait_for(lambda: shared.add(f"steps of 0 with {size}", 0) >= begun + 5, SECONDS)


def _be_away(shared: dist.Store, host: Host, seconds: float, training: Training) -> None:
    """Lose the network for so long, or until the others have gone on; all end some steps after the return."""
    set_link(host, "down")
    if seconds:
        time.sleep(seconds)
    else:
        _wait_for_steps(shared, LAST)
    trained_alone = [shared.add(f"steps of {LAST} with {size}", 0) for size in range(1, SIZE)]
    set_link(host, "up")
    assert trained_alone == [0, 0]
    _wait_for_steps(shared, SIZE)
    shared.set("last step", str(training.step + 40))


def _train(hosts: list[Host], seconds: float) -> tuple[Tensor, set[int]]:
    """Return the weights, and the numbers of members with which there were steps."""
    me, shared, members = join(at_least=SIZE, address=hosts[0].address)
    sizes: set[int] = set()
    with ThreadPoolExecutor(1) as pool, members:
        torch.manual_seed(me)
        network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        optimizer = torch.optim.AdamW(network.parameters(), 0.001)
        training = members.train(DDP(network), optimizer, "bytegrad")
        members._group._meetings.at_least = 1
        meet(shared, "train", SIZE)
        away = pool.submit(_be_away, shared, hosts[me], seconds, training) if me == LAST else None
        while training.step < (int(shared.get("last step")) if shared.check(["last step"]) else math.inf):
            assert away is None or not away.done() or away.result() is None
            with training.attempt():
                generator = torch.Generator().manual_seed(100 * training.step + dist.get_rank())
                inputs = torch.randn(8, 64, generator=generator)
                optimizer.zero_grad()
                (training.ddp(inputs) - inputs).square().mean().backward()
                optimizer.step()
            sizes.add(dist.get_world_size())
            shared.add(f"steps of {me} with {dist.get_world_size()}", 1)
            time.sleep(PAUSE)
    # The first one serves the store.
    meet(shared, "over", SIZE)
    return weights_of(training), sizes


@pytest.mark.parametrize("seconds", [0.0, 5.0], ids=["until the others have gone on", "for some seconds"])
def test_a_host_that_is_cut_off_stays_a_member_for_some_seconds_and_is_one_again_when_it_is_back(
    seconds: float,
) -> None:
    with hosts_over(count=SIZE) as hosts:
        (first, sizes), *others = run_ranks(SIZE, _train, hosts, seconds, hosts=hosts)
    assert all(torch.equal(weights, first) for weights, _ in others)
    assert sizes == ({SIZE} if seconds else {LAST, SIZE})
