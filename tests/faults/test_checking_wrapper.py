# SPDX-License-Identifier: Apache-2.0
"""TORCH_DISTRIBUTED_DEBUG=DETAIL: torch's own comparison of calls, over our backend."""

import os
from datetime import timedelta
from pathlib import Path

import bagua
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks


def _with_detail() -> None:
    """Make the default group anew: torch reads its variable only once, and these processes have torch loaded."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = Path(os.environ["FAULTS_FOLDER"])
    dist.destroy_process_group()
    fresh = dist.FileStore(str(folder / "detail"), size)  # type: ignore[attr-defined]
    dist.init_process_group("bagua", store=fresh, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    assert type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__ == "_ProcessGroupWrapper"


def _train_with_detail() -> list[float]:
    _with_detail()
    torch.manual_seed(0)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 3))

    bagua.register_comm_hook(ddp, "bytegrad")
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    dist.barrier()
    received = torch.zeros(2)
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), 1)
    else:
        dist.recv(received, 0)
        assert received.tolist() == [1.0, 1.0]
    weights: list[float] = next(iter(ddp.parameters())).flatten().tolist()
    return weights


def test_the_checking_wrapper_of_torch_works_with_bagua(tmp_path: Path) -> None:
    results = run_ranks(2, _train_with_detail, env={"FAULTS_FOLDER": str(tmp_path)})
    assert results[0] == results[1]


def _detail_finds_a_mismatch() -> str:
    _with_detail()
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(4 + dist.get_rank()))
    return str(caught.value)


def test_the_checking_wrapper_of_torch_finds_mismatches_first(tmp_path: Path) -> None:
    messages = run_ranks(2, _detail_finds_a_mismatch, env={"FAULTS_FOLDER": str(tmp_path)})
    for message in messages:
        assert "mismatch" in message
        assert "do not make the same call" not in message
