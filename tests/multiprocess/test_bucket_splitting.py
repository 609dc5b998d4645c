# SPDX-License-Identifier: Apache-2.0
"""Between hosts DDP's buckets are cut smaller, where the user has not chosen their size."""

from itertools import pairwise
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from bagua._buckets import settle_buckets
from devices import randn
from hooked_models import Gradients, emulated_hosts, same, train, train_without_bagua
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.any_device

STEPS = 5
# 7.4 MB, which DDP's default of 25 MiB leaves together; the largest parameter alone is more than a bucket is to hold.
LAYERS = (64, 700, 900, 1300, 32)
MODES: list[dict[str, bool]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
]


def _network() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(LAYERS)))


def _loss(model: nn.Module, step: int) -> Tensor:
    result: Tensor = model(randn(3, LAYERS[0], seed=100 * step + dist.get_rank())).square().mean()
    return result


def _train(hosts: str, name: str, **ddp_options: Any) -> tuple[list[Gradients], float, list[int]]:
    """Gradients of all steps, buckets per step, and the number of parameters in each of the last step."""
    handles: list[bagua.Handle] = []
    with emulated_hosts(hosts) as group:

        def register(ddp: DDP) -> None:
            handles.append(bagua.register_comm_hook(ddp, name))

        history = train(_network(), register, STEPS, _loss, process_group=group, **ddp_options)
        stats = handles[0].stats()
        return history, stats["buckets"] / stats["steps"], [len(bucket) for bucket in handles[0].state_dict()["layout"]]


@pytest.mark.parametrize("mode", MODES, ids=str)
@on_ranks(2)
def test_split_buckets_hold_the_gradients_of_ddp_to_the_bit(mode: dict[str, Any]) -> None:
    history, buckets, _ = _train("ab", "gradient_allreduce", **mode)
    assert same(history, train_without_bagua(_network(), steps=STEPS, loss=_loss, **mode))
    assert buckets > 2


@on_ranks(2)
def test_a_size_that_the_user_chose_and_the_buckets_on_a_single_host_are_left_alone() -> None:
    for hosts, options in (("ab", {"bucket_cap_mb": 25}), ("aa", {})):
        assert _train(hosts, "gradient_allreduce", **options)[1] <= 2


@on_ranks(2)
def test_every_parameter_travels_once_in_buckets_of_a_codec() -> None:
    _, buckets, layout = _train("ab", "bytegrad")
    assert buckets > 2
    assert sum(layout) == 2 * (len(LAYERS) - 1)


def _layout_and_gradients(*, is_settled: bool) -> tuple[list[list[int]], Gradients]:
    """Return DDP's final buckets, and the gradients of the last step."""
    ddp = DDP(_network(), bucket_cap_mb=1)
    calls: list[Tensor] = []
    for parameter in ddp.parameters():
        parameter.register_hook(calls.append)
        parameter.register_post_accumulate_grad_hook(calls.append)
    if is_settled:
        settle_buckets(ddp)
        assert not calls
    handle = bagua.register_comm_hook(ddp, "gradient_allreduce")
    for step in range(1 if is_settled else 0, 4):
        ddp.zero_grad()
        _loss(ddp, step).backward()
    return handle.layout, [p.grad for p in ddp.parameters()]


@on_ranks(2)
def test_buckets_are_settled_as_by_a_first_backward_without_the_users_hooks() -> None:
    layout, gradients = _layout_and_gradients(is_settled=True)
    expected, others = _layout_and_gradients(is_settled=False)
    assert len(layout) > 2
    assert layout == expected
    assert all(map(torch.equal, gradients, others))
