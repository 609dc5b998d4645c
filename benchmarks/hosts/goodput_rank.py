# SPDX-License-Identifier: Apache-2.0
"""A process of goodput.py: trains until it is killed, and logs each step that counts."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import bagua
import bagua.elastic
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_ALGORITHM = "bytegrad"
# 42 MB of weights, and the seconds that a forward and a backward would take on a device of their own.
_WIDTH, _LAYERS = 1024, 10
_COMPUTE = 0.1
# Seconds between two checkpoints.
_CHECKPOINT = 10.0


def _network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    network = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
    return network, torch.optim.AdamW(network.parameters(), 1e-5)


def _model() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    network, optimizer = _network()
    return DistributedDataParallel(network), optimizer


def _step(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    time.sleep(_COMPUTE)
    ddp(torch.randn(4, _WIDTH)).square().mean().backward()
    optimizer.step()


def _elastic(store: dist.Store, log: Any) -> None:
    with bagua.elastic.Members(store) as members:
        ddp, optimizer = _model()
        training = members.train(ddp, optimizer, _ALGORITHM)
        while True:
            before, was_healing = training.step, training.is_healing
            with training.attempt():
                _step(ddp, optimizer)
            if training.step > before:
                log(training.step, was_healing)


def _from_checkpoints(rank: int, size: int, address: str, port: str, life: str, folder: Path, log: Any) -> None:
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(int(port) + int(life)))
    dist.init_process_group("bagua", rank=rank, world_size=size)
    ddp, optimizer = _model()
    bagua.register_comm_hook(ddp, _ALGORITHM)
    file, step = folder / "checkpoint.pt", 0
    if file.exists():
        saved = torch.load(file)
        ddp.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    saved_at = time.monotonic()
    while True:
        _step(ddp, optimizer)
        step += 1
        log(step, False)
        if rank == 0 and time.monotonic() - saved_at > _CHECKPOINT:
            state = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, file.with_suffix(".unfinished"))
            file.with_suffix(".unfinished").replace(file)
            saved_at = time.monotonic()


def _under_torchft(rank: int, own_address: str, lighthouse: str, log: Any) -> None:
    # It tells others where it is by this name, which no emulated host has.
    socket.gethostname = lambda: own_address
    import torchft

    store = dist.TCPStore(own_address, 0, is_master=True, wait_for_workers=False)
    network, adamw = _network()

    def load(state: dict[str, Any]) -> None:
        network.load_state_dict(state["network"])
        adamw.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=load,
        state_dict=lambda: {"network": network.state_dict(), "optimizer": adamw.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{rank}",
        lighthouse_addr=lighthouse,
        hostname=own_address,
        store_addr=own_address,
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=20),
    )
    model: Any = torchft.DistributedDataParallel(manager, network)
    optimizer: Any = torchft.Optimizer(manager, adamw)
    while True:
        before = manager.current_step()
        _step(model, optimizer)
        if manager.current_step() > before:
            is_healing = not manager.is_participating()
            log(manager.current_step(), is_healing, manager.num_participants() + is_healing)


def main() -> None:
    mode, number, ranks, address, own_address, port, life, folder = sys.argv[1:]
    rank = int(number)
    torch.set_num_threads(1)
    with Path(folder, f"steps-{rank}.jsonl").open("a") as steps:

        def log(step: int, is_healing: bool, members: int = 0) -> None:
            size = members or dist.get_world_size()
            line = {"at": time.time(), "rank": rank, "step": step, "size": size, "is_healing": is_healing}
            print(json.dumps(line), file=steps, flush=True)

        if mode == "elastic":
            _elastic(dist.TCPStore(address, int(port)), log)
        elif mode == "torchft":
            _under_torchft(rank, own_address, f"http://{address}:{port}", log)
        else:
            _from_checkpoints(rank, int(ranks), address, port, life, Path(folder), log)


if __name__ == "__main__":
    main()
