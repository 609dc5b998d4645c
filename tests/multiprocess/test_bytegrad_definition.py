# SPDX-License-Identifier: Apache-2.0
"""bytegrad against its definition, written here once more with plain tensors on one rank."""

from collections.abc import Sequence
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from hooked_models import Leaves, emulated_hosts, random_gradient, reduced, same, same_everywhere
from ranks import Pools, RankPool, on_ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.any_device

# Fewer elements than ranks, multiples of no rank count, of some and of all; below and above a block of SIMD registers.
LENGTHS = [1, 2, 3, 5, 7, 12, 97, 1003, 20_011]


def coded(chunk: Tensor) -> Tensor:
    """What one chunk is after coding and decoding with the default codec, int8."""
    values = torch.nn.functional.pad(chunk.float(), (0, -chunk.numel() % 128)).view(-1, 128)
    largest = values.abs().amax(1, keepdim=True)
    # Tensors of one size are divided; a number would be made a reciprocal on a GPU. Floats that are not negative lie in
    # the order of their bits, so this is the next bfloat16 that is not below.
    bits = (largest / torch.full_like(largest, 127.0)).view(torch.int32) + 0xFFFF
    scale = (bits - bits % 0x10000).view(torch.float32)
    decoded = (values * (1 / scale)).round() * scale  # half to even
    return torch.where(largest < 2.0**-80, 0.0, decoded).view(-1)[: chunk.numel()].to(chunk.dtype)


def coded_by_the_original(chunk: Tensor) -> Tensor:
    """The same with the original's codec, minmax_uint8."""
    values = chunk.float()
    low, high = values.min(), values.max()
    if low == high:
        return chunk.clone()  # a departure: the original is off by up to 1.2e-7
    scale = torch.tensor(255.0) / (high - low + 1e-7)  # not 255.0 / tensor, which multiplies by a reciprocal
    upper = (high * scale).round()  # half to even
    lower = upper - 255
    # Two ties can round apart, which leaves the lowest value at -1; a GPU's conversion makes that 0.
    codes = (torch.minimum((values * scale).round(), upper) - lower).clamp(min=0).to(torch.uint8)
    return ((codes.float() + lower) / scale).to(chunk.dtype)


CODES = {"int8": coded, "minmax_uint8": coded_by_the_original}


def defined_result(gradients: list[Tensor], average: bool = True, codec: str = "int8") -> Tensor:
    """What bytegrad makes of one bucket, given every rank's (two to four ranks)."""
    # The original adds up even and odd ranks apart.
    code, lanes_of_sum = CODES[codec], 2 if codec == "minmax_uint8" else 1
    chunk_length = -(-gradients[0].numel() // len(gradients))
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    reduced = []
    for copies in zip(*(gradient.split(chunk_length) for gradient in gradients), strict=True):
        lanes = [torch.zeros(copies[0].numel(), dtype=dtype) for _ in range(lanes_of_sum)]
        for rank, copy in enumerate(copies):
            lanes[rank % lanes_of_sum] += code(copy)
        total = torch.stack(lanes).sum(0)
        reduced.append(code((total / len(gradients) if average else total).to(copies[0].dtype)))
    return torch.cat(reduced)


def error_bound(contributions: list[Tensor]) -> float:
    """How far from the exact sum of what the hosts contribute the result may be.

    A code is off by half a step, 1/254 of the largest magnitude (and the rounding of a scale, up to 1/128 of it), for
    each contribution and once more for their sum, which the first errors may have made larger. Each of the few
    operations with floating-point numbers (two codings, up to four additions, a division, a conversion) rounds a number
    that is no larger than the magnitudes added up, plus those errors.
    """
    half_step = (1 + 1 / 128) / 254
    first = sum(float(c.abs().max()) * half_step for c in contributions)
    exact = torch.stack([c.double() for c in contributions]).sum(0)
    second = (float(exact.abs().max()) + first) * half_step
    magnitude = sum(float(c.abs().max()) for c in contributions) + first + second
    return first + second + 8 * torch.finfo(torch.float32).eps * magnitude


Results = list[tuple[int, int, Tensor]]  # each with its length and step


def _reduced_gradients(lengths: Sequence[int], dtype: torch.dtype, hosts: str, options: dict[str, Any]) -> Results:
    results: Results = []
    with emulated_hosts(hosts or "h" * dist.get_world_size()) as group:
        for length in lengths:
            ddp = DDP(Leaves(length, dtype=dtype), process_group=group)
            bagua.register_comm_hook(ddp, "bytegrad", **options)
            for step in range(3):
                [result] = reduced(ddp, [random_gradient(length, dist.get_rank(), step, dtype)])
                assert same_everywhere(result), f"{length=} {step=}"
                results.append((length, step, result))
    return results if dist.get_rank() == 0 else []


def reduced_gradients(
    pool: RankPool, lengths: Sequence[int], *, dtype: torch.dtype = torch.float32, hosts: str = "", **options: Any
) -> Results:
    """Checked to be the same bits on every rank."""
    return list(pool.run(_reduced_gradients, lengths, dtype, hosts, options)[0])


def given_gradients(pool: RankPool, length: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [random_gradient(length, rank, step, dtype) for rank in range(pool.world_size)]


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32),
        ({"average": False}, torch.float32),
        ({}, torch.float64),
        ({}, torch.float16),
        ({}, torch.bfloat16),
        ({"codec": "minmax_uint8"}, torch.float32),
        ({"codec": "minmax_uint8", "average": False}, torch.float32),
    ],
    ids=str,
)
def test_equals_the_definition(peers: RankPool, options: dict[str, Any], dtype: torch.dtype) -> None:
    for length, step, result in reduced_gradients(peers, LENGTHS, dtype=dtype, hierarchical=False, **options):
        expected = defined_result(given_gradients(peers, length, step, dtype), **options)
        assert same(result, expected), f"{length=} {step=}"


def test_one_rank_keeps_its_gradients(rank_pools: Pools) -> None:
    for length, step, result in reduced_gradients(rank_pools[1], [97], hierarchical=False):
        assert torch.equal(result, random_gradient(length, 0, step))


@on_ranks("peers")
def test_a_value_that_is_not_finite_spoils_its_chunk_only() -> None:
    size = dist.get_world_size()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for value in (float("nan"), float("inf"), float("-inf")):
            gradient = torch.linspace(-1, 1, 10 * size).to(dtype)
            if dist.get_rank() == size - 1:
                gradient[3] = value  # in the chunk of rank 0
            ddp = DDP(Leaves(gradient.numel(), dtype=dtype))
            bagua.register_comm_hook(ddp, "bytegrad", hierarchical=False)
            [result] = reduced(ddp, [gradient])
            assert not result[:10].isfinite().any(), (dtype, value)
            assert result[10:].isfinite().all(), (dtype, value)


@on_ranks("peers")
def test_on_a_single_host_the_hierarchical_form_is_the_plain_mean() -> None:
    results: list[Tensor] = []
    for name in ("bytegrad", "gradient_allreduce"):
        ddp = DDP(Leaves(1003))
        bagua.register_comm_hook(ddp, name)
        results += reduced(ddp, [random_gradient(1003, dist.get_rank())])
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("hosts", "average"),
    [*((hosts, True) for hosts in ("AABB", "AAAB", "ABBA", "AABC", "ABA")), ("ABB", False)],
)
def test_hosts_of_several_ranks_are_within_the_error_of_coding(rank_pools: Pools, hosts: str, average: bool) -> None:
    pool = rank_pools[len(hosts)]
    divisor = len(hosts) if average else 1  # the mean is over ranks, however many each host has
    for length, step, result in reduced_gradients(pool, LENGTHS[:-1], hosts=hosts, hierarchical=True, average=average):
        given = given_gradients(pool, length, step)
        by_host = [
            torch.stack([given[rank].double() for rank in range(len(hosts)) if hosts[rank] == host]).sum(0) / divisor
            for host in sorted(set(hosts))
        ]
        error = (result.double() - torch.stack(by_host).sum(0)).abs().max()
        magnitude = sum(float(gradient.abs().max()) for gradient in given) / divisor
        rounding = len(hosts) * torch.finfo(torch.float32).eps * magnitude  # of the sums inside the hosts
        assert error <= error_bound(by_host) + rounding, f"{length=} {step=}"


def test_between_hosts_the_messages_are_compressed(rank_pools: Pools) -> None:
    length = 40_000
    for result in rank_pools[4].run(_stats_on_hosts, "AABB", length):
        assert "compress" in result["seconds"]
        # Inside the host, half of the gradient to the peer and half of the result back: 2 x 4 x length / 2 bytes.
        # Between the hosts, a lane (half) in two chunks of a byte for each element, one of them there and one back.
        assert result["wire_bytes"] == pytest.approx(4 * length + length / 2, rel=0.01)


def _stats_on_hosts(hosts: str, length: int) -> dict[str, Any]:
    with emulated_hosts(hosts) as group:
        ddp = DDP(Leaves(length), process_group=group)
        handle = bagua.register_comm_hook(ddp, "bytegrad", guard=None)
        ddp([random_gradient(length, dist.get_rank())]).backward()
        return handle.stats()
