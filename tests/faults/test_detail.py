# SPDX-License-Identifier: Apache-2.0
"""TORCH_DISTRIBUTED_DEBUG=DETAIL: torch puts a checking wrapper around every group."""

from pathlib import Path
from typing import Any

import bagua
import torch
import torch.distributed as dist
from hooked_models import optimizer_for, same_everywhere
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from trouble import expect_error

STEPS = 4


def _is_checked(group: Any) -> bool:
    return type(group._get_backend(torch.device("cpu"))).__name__ == "_ProcessGroupWrapper"


def _train(algorithm: str, group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    ddp = DDP(model, process_group=group, bucket_cap_mb=0.001)
    optimizer = optimizer_for(algorithm, ddp, lr=0.1)
    # On a single host nothing is compressed by default.
    options: dict[str, Any] = {} if algorithm in ("gradient_allreduce", "async") else {"hierarchical": False}
    if algorithm in ("local_sgd", "diloco"):
        options["sync_every"] = 2
    if algorithm == "diloco":
        options |= {"fragments": 1, "delay": 0}
    handle = bagua.register_comm_hook(ddp, algorithm, optimizer=optimizer, **options)
    for step in range(STEPS):
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        ddp(data).square().mean().backward()
        optimizer.step()
    if algorithm == "async":
        handle.abort()
    assert handle.stats()["rounds"] > 0
    if algorithm in ("gradient_allreduce", "bytegrad", "qadam", "async"):
        # These leave all ranks with the same weights, async at its abort().
        assert same_everywhere(*ddp.parameters(), group=group)


def _train_all_then_differ(store: str) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # as `import torch` does
    file = dist.FileStore(store, size)  # type: ignore[attr-defined]
    dist.init_process_group("bagua", store=file, rank=rank, world_size=size)
    assert _is_checked(dist.group.WORLD)
    received = torch.zeros(2)
    if rank == 0:
        dist.send(torch.ones(2), 1)
    else:
        dist.recv(received, 0)
        assert received.tolist() == [1.0, 1.0]
    for algorithm in bagua.available_algorithms():
        group: Any = dist.new_group()
        assert _is_checked(group)
        _train(algorithm, group)
        dist.destroy_process_group(group)
    return expect_error(lambda: dist.all_reduce(torch.ones(4 + rank))).message


def test_every_algorithm_trains_under_torch_s_checks_and_a_mismatch_is_one_clear_error(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    env = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_FR_DUMP_TEMP_FILE": f"{traces}/trace_"}
    for message in run_ranks(2, _train_all_then_differ, str(tmp_path / "store"), backend="gloo", env=env):
        # Torch's own, of either rank. Ours would come only if the call had gone on.
        assert "Detected mismatch between collectives" in message
        assert "do not make the same call" not in message
    assert not list(traces.iterdir()), "no group has failed"
