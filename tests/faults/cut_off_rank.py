# SPDX-License-Identifier: Apache-2.0
"""One rank on an emulated host, for test_disconnects.py: works until an error or until its time is over.

cut_off_rank.py RANK SIZE ADDRESS-OF-RANK-0 TIMEOUT WORKLOAD SECONDS
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from random_faults import ALGORITHMS, FIRST_STEPS, workload
from reset_connections import reset_connections

STORE_PORT = 29400
# Ranks may start at different times on a busy machine: that is not what the tests are about.
START_SECONDS = 120.0


def _obey() -> None:
    """Reset the connections to the store for each line, while the other threads work; until the test wants no more."""
    for _ in sys.stdin:
        print(f"reset {reset_connections(lambda own, peer: STORE_PORT in (own, peer))}", flush=True)


def _add() -> None:
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    assert tensor[0].item() == dist.get_world_size()


def main() -> None:
    rank, size, address, timeout = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    if sys.argv[5] in ALGORITHMS:
        # Seconds of work, which the first optimizer would do.
        importlib.import_module("torch._dynamo")
    start = timedelta(seconds=START_SECONDS)
    store = dist.TCPStore(address, STORE_PORT, size, is_master=rank == 0, timeout=start)
    store.set(f"started {rank}", "")
    store.wait([f"started {peer}" for peer in range(size)], start)
    torch.set_num_threads(1)
    store.set_timeout(timedelta(seconds=timeout))
    dist.init_process_group("bagua", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    obeying = threading.Thread(target=_obey, daemon=True)
    obeying.start()
    work = _add if sys.argv[5] == "all_reduce" else workload(sys.argv[5])
    step = 0
    end = time.monotonic() + float(sys.argv[6])
    try:
        while True:
            # Whether to go on is the decision of one rank, so that all make the same calls.
            goes_on = torch.tensor([float(time.monotonic() < end)])
            dist.broadcast(goes_on, 0)
            work()
            step += 1
            if step == FIRST_STEPS:
                print("working", flush=True)
            if goes_on.item() == 0.0:
                break
    except RuntimeError as error:
        print(f"error {time.monotonic()} {error}", flush=True)
        dist.destroy_process_group()
    else:
        dist.destroy_process_group()
        print("done", flush=True)
    # The store goes with rank 0: not before all have heard what there is to hear.
    obeying.join()


if __name__ == "__main__":
    main()
