# SPDX-License-Identifier: Apache-2.0
"""Stock backends alone: whether ranks can share this GPU at all. Imports nothing of ours."""

import time

import torch
import torch.distributed as dist
from check import check
from devices import settle


@check(sizes=(2,), seconds=15)
def reductions_in_a_loop() -> str:
    size, count = dist.get_world_size(), 200
    tensor = torch.zeros(1000)
    begin = time.perf_counter()
    for turn in range(count):
        tensor.fill_(dist.get_rank() + turn)
        dist.all_reduce(tensor)
    settle()
    seconds = (time.perf_counter() - begin) / count
    assert (tensor == size * (size - 1) / 2 + size * (count - 1)).all()
    large = torch.ones(4 << 20)
    for _ in range(4):
        dist.all_reduce(large)
    assert (large == size**4).all()
    return f"{1e3 * seconds:.2f} ms an all_reduce of 4 KB"
