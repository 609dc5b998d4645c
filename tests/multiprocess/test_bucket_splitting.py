# SPDX-License-Identifier: Apache-2.0
"""Between hosts DDP's buckets are cut smaller, where the user has not chosen their size."""

from itertools import pairwise
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from devices import STOCK_BACKEND, randn
from hooked_models import Gradients, emulated_hosts, new_group, same, train
from ranks import Pools
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.any_device

STEPS = 5
# 7.4 MB, which DDP's default of 25 MiB leaves together; the largest parameter alone is more than a bucket is to hold.
LAYERS = (64, 700, 900, 1300, 32)
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "find_unused_parameters": {"find_unused_parameters": True},
}


def _network() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(LAYERS)))


def _loss(model: nn.Module, step: int) -> Tensor:
    result: Tensor = model(randn(3, LAYERS[0], seed=100 * step + dist.get_rank())).square().mean()
    return result


def _train(hosts: str, mode: str, name: str, **ddp_options: Any) -> tuple[list[Gradients], float, list[int]]:
    """Gradients of all steps, buckets per step, and the number of parameters in each of the last step."""
    handles: list[bagua.Handle] = []
    with emulated_hosts(hosts) as group:

        def register(ddp: DDP) -> None:
            handles.append(bagua.register_comm_hook(ddp, name))

        history = train(_network(), register, STEPS, _loss, process_group=group, **MODES[mode], **ddp_options)
        stats = handles[0].stats()
        return history, stats["buckets"] / stats["steps"], [len(bucket) for bucket in handles[0].state_dict()["layout"]]


def _stock(mode: str) -> list[Gradients]:
    with new_group(backend=STOCK_BACKEND) as group:
        return train(_network(), lambda ddp: None, STEPS, _loss, process_group=group, **MODES[mode])


def _split_like_stock(mode: str) -> tuple[bool, float]:
    history, buckets, _ = _train("ab", mode, "gradient_allreduce")
    return same(history, _stock(mode)), buckets


def _train_with_chosen_size() -> float:
    return _train("ab", "default", "gradient_allreduce", bucket_cap_mb=25)[1]


@pytest.mark.parametrize("mode", MODES)
def test_split_buckets_hold_the_gradients_of_ddp_to_the_bit(rank_pools: Pools, mode: str) -> None:
    for is_same, buckets in rank_pools[2].run(_split_like_stock, mode):
        assert is_same
        assert buckets > 2


def test_a_size_that_the_user_chose_is_left_alone(rank_pools: Pools) -> None:
    assert all(buckets <= 2 for buckets in rank_pools[2].run(_train_with_chosen_size))


def test_a_single_host_keeps_the_buckets_of_ddp(rank_pools: Pools) -> None:
    for _, buckets, _ in rank_pools[2].run(_train, "aa", "default", "gradient_allreduce"):
        assert buckets <= 2


def test_every_parameter_travels_once_in_buckets_of_a_codec(rank_pools: Pools) -> None:
    for _, buckets, layout in rank_pools[2].run(_train, "ab", "default", "bytegrad"):
        assert buckets > 2
        assert sum(layout) == 2 * (len(LAYERS) - 1)
