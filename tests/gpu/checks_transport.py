# SPDX-License-Identifier: Apache-2.0
"""Collectives and messages, each against a plain reference; on CUDA tensors compressed ones also beside the CPU."""

import itertools
import time
from datetime import timedelta
from typing import Any

import bagua
import torch
import torch.distributed as dist
from check import Differences, assert_same_on_all_ranks, check, told_by_all
from devices import DEVICE, here, settle
from reference import FLOATS, MEANINGFUL, reduced, values
from soak_calls import start
from soak_parts import Side
from soak_plan import MOVES, POOL_LENGTH, REDUCTIONS, Call

# Those of NCCL.
DTYPES = (*FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
COUNTS = (0, 1, 1003, 1_000_000 if DEVICE == "cuda" else 30_000)


def _side() -> Side:
    ranks = list(range(dist.get_world_size()))
    return Side(dist.group.WORLD, ranks, dist.get_rank())


@check(seconds=25)
def first_reductions() -> str:
    """Of this world; where they fail nothing else is of use."""
    size = dist.get_world_size()
    for count in (1, 1000, 1_000_000):
        tensor = torch.full((count,), float(dist.get_rank() + 1))
        dist.all_reduce(tensor)
        assert (tensor == size * (size + 1) / 2).all(), f"{count} elements"
    settle()
    begin = time.perf_counter()
    for _ in range(50):
        dist.all_reduce(tensor[:1000])
    settle()
    return f"{20 * (time.perf_counter() - begin):.2f} ms an all_reduce of 4 KB"


@check(sizes=(2,), seconds=25)
def thousands_of_broadcasts_in_one_loop() -> str:
    """Non-blocking communicators of NCCL hung at random in such a loop once (PyTorch's issue 153960)."""
    begin, done, size = time.monotonic(), 0, dist.get_world_size()
    for done in range(250, 5001, 250):
        for turn in range(done - 250, done):
            tensor = torch.full((16,), float(dist.get_rank() * 10_000 + turn))
            dist.broadcast(tensor, turn % size)
        assert (tensor == turn % size * 10_000.0 + turn).all()
        if told_by_all(str(time.monotonic() - begin > 12))[0] == "True":
            break
    return f"{done} broadcasts, {1e3 * (time.monotonic() - begin) / done:.2f} ms each"


@check({kind: (kind,) for kind in (*REDUCTIONS, *MOVES, "message", "ring", "coalesced", "rounding")})
def collective(kind: str) -> str:
    """Every dtype and operation that NCCL has, to the bit, and nothing beside the result is written."""
    side, done = _side(), 0
    has_operations = kind in (*REDUCTIONS, "coalesced")
    for dtype, count in itertools.product(FLOATS if kind == "rounding" else DTYPES, COUNTS):
        for op in [op for op, of in MEANINGFUL if of == dtype] if has_operations else ["SUM"]:
            root = done % side.size
            call = Call(done, kind, 0, dtype, op, count, root, (root + 1) % side.size, 17, 1001, seed=3 * done)
            assert call.offset + side.size * (count * side.size + call.stride) < POOL_LENGTH
            started = start(call, side)
            for work in started.works:
                work.wait()
            started.check()
            done += 1
    assert len(set(told_by_all(str(side.checksum)))) == 1, "rounded results differ between ranks"
    return f"{done} calls"


@check()
def sum_with_a_factor_multiplies_before_it_adds() -> str:
    found, rank, size = Differences(), dist.get_rank(), dist.get_world_size()
    for dtype in FLOATS:
        inputs = [values(dtype, (1003,), other) for other in range(size)]
        for factor in (0.25, torch.tensor([0.25], dtype=dtype)):
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))  # type: ignore[attr-defined]
            found.same(f"{dtype} by {factor}", tensor, reduced([0.25 * one for one in inputs], "SUM"))
    return found.verdict()


@check()
def wait_with_a_limit_waits_on_the_host() -> None:
    size = dist.get_world_size()
    for _ in range(5):
        tensor = torch.full((1003,), float(dist.get_rank()))
        work: Any = dist.all_reduce(tensor, async_op=True)
        assert work.wait(timedelta(seconds=20))
        assert work.is_completed()
        assert (tensor == size * (size - 1) / 2).all()


def _compressed(codec: str, x: torch.Tensor) -> list[torch.Tensor]:
    size = dist.get_world_size()
    whole, part = x.clone(), torch.zeros(x.numel() // size, dtype=x.dtype)
    joined = torch.zeros(size * x.numel(), dtype=x.dtype)
    bagua.compressed.all_reduce(whole, dist.ReduceOp.AVG, codec=codec)
    bagua.compressed.reduce_scatter_tensor(part, x[: size * part.numel()], dist.ReduceOp.AVG, codec=codec)
    bagua.compressed.all_gather_into_tensor(joined, x, codec=codec)
    return [whole, part, joined]


# Of a mean's norm, of normally distributed values; coded twice.
COARSENESS = {"minmax_uint8": 0.015, "int8": 0.015, "4bit": 0.15, "2bit": 0.6, "1bit": 0.95}


@check({codec: (codec,) for codec in bagua.available_codecs()}, seconds=20)
def compressed_collectives_are_near_and_on_cuda_those_of_the_cpu(codec: str) -> str:
    found, rank, size = Differences(), dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16):
        inputs = []
        for other in range(size):
            drawn = torch.randn(50_004, generator=torch.Generator().manual_seed(other), device="cpu")
            inputs.append(drawn.to(dtype))
        results = _compressed(codec, here(inputs[rank]))
        with torch.device("cpu"):
            beside = _compressed(codec, inputs[rank])
        mean = torch.stack(inputs).double().mean(0)
        expected = [mean, mean.chunk(size)[rank], torch.cat(inputs)]
        for name, result, on_cpu, exact in zip(("all", "part", "joined"), results, beside, expected, strict=True):
            found.near(f"{dtype} {name}", result, exact, COARSENESS[codec])
            found.same(f"{dtype} {name} beside the CPU", result, on_cpu)
        assert_same_on_all_ranks([results[0], results[2]])
    return found.verdict()
