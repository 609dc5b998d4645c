# SPDX-License-Identifier: Apache-2.0
"""What is said of the bytes of a model before it trains is what its algorithm then sends."""

import logging
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from bagua._attachment import names_and_roles
from bagua._message_bytes import Parameter, coded_bytes, parameters_of
from hooked_models import logged
from ranks import Pools, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

_STEPS = 2
_FLAT: dict[str, Any] = {"hierarchical": False, "guard": None}
_ALGORITHMS: list[tuple[str, dict[str, Any]]] = [
    ("gradient_allreduce", {}),
    ("bytegrad", _FLAT),
    ("bytegrad", _FLAT | {"codec": "minmax_uint8"}),
    ("quantized_allreduce", _FLAT),
    ("quantized_allreduce", _FLAT | {"codec": "1bit"}),
    ("quantized_allreduce", _FLAT | {"codec": "deep.* = 2bit, * = 4bit", "exact": ("head",)}),
    ("quantized_allreduce", _FLAT | {"codec": {"*": "4bit"}, "exact": ()}),
    ("powersgd", {"rank": 2, "start_step": 0, "guard": None}),
    ("powersgd", {"rank": 2, "codec": "int8", "start_step": 0, "guard": None}),
]


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 64)
        self.deep = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
        self.head = nn.Linear(64, 100)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.head(self.deep(self.table(rows)))
        return out


@pytest.mark.parametrize(("algorithm", "options"), _ALGORITHMS)
@on_ranks(3)
def test_bytes_are_those_that_are_sent(algorithm: str, options: dict[str, Any]) -> None:
    torch.manual_seed(7)
    ddp = DDP(_Network())
    parameters = parameters_of(ddp.module.parameters(), names_and_roles(ddp.module, [*ddp.module.parameters()]))
    with bagua.register_comm_hook(ddp, algorithm, **options) as handle:
        for _ in range(_STEPS):
            ddp(torch.arange(100)).square().mean().backward()
        size = dist.get_world_size()
        foretold = 2 * (size - 1) / size * coded_bytes(handle.options, parameters)
        # The ends of messages are filled up, which is more than a fiftieth where factors are all that is sent.
        assert handle.stats()["wire_bytes"] / _STEPS == pytest.approx(foretold, rel=0.02, abs=700)


def test_only_below_8_bits_are_embeddings_coded_finer_than_the_rest() -> None:
    table = [Parameter("table.weight", (1000, 64), "embedding")]
    found = {codec: coded_bytes({"codec": codec, "exact": ""}, table) for codec in ("minmax_uint8", "int8", "4bit")}
    assert found == {"minmax_uint8": 64_000, "int8": 65_000, "4bit": 65_000}


def test_a_head_that_shares_its_weight_with_an_embedding_counts_as_one() -> None:
    network = _Network()
    network.head.weight = network.table.weight
    expected = [("table.weight", "embedding"), ("head.bias", "head")]
    assert names_and_roles(network, [network.table.weight, network.head.bias]) == expected


def _said(algorithm: str, options: dict[str, Any]) -> list[str]:
    logger = logging.getLogger("bagua")
    logger.setLevel(logging.INFO)
    try:
        with logged() as text:
            bagua.register_comm_hook(DDP(nn.Linear(999, 1000)), algorithm, **options)
    finally:
        logger.setLevel(logging.NOTSET)
    return [line for line in text.getvalue().splitlines() if line.startswith(f"{algorithm}: ")]


def test_rank_0_says_what_becomes_of_the_bytes(rank_pools: Pools) -> None:
    first, *others = rank_pools[3].run(_said, "bytegrad", {"hierarchical": False})
    assert first == ["bytegrad: int8, 4.0 MB of gradients become 1.0 MB a step; 3 ranks"]
    assert others == [[], []]
    [line] = rank_pools[3].run(_said, "powersgd", {"rank": 4})[0]
    assert line.startswith("powersgd: factors of rank 4, 4.0 MB of gradients become 0.0 MB a step, after 1,000 steps")
