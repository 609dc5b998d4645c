# SPDX-License-Identifier: Apache-2.0
"""Ranks that are threads of one process, as torchft's tests and others' have them."""

from pathlib import Path

import pytest
from script_ranks import run_script

SCRIPT = """
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from bagua._backend import create_backend
from torch.distributed.distributed_c10d import AllreduceOptions, _DistributedBackendOptions

RANKS, SIZE = 3, 100_000
server = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
sums = {}


def run(rank):
    options = _DistributedBackendOptions()
    options.store = dist.PrefixStore("group", dist.TCPStore("localhost", server.port, None, False))
    options.timeout = timedelta(seconds=20)
    options.group_rank, options.group_size = rank, RANKS
    options.group_id, options.global_ranks_in_group = "threads", list(range(RANKS))
    backend = create_backend(options, None)
    tensor = torch.full((SIZE,), float(rank + 1))
    backend.allreduce([tensor], AllreduceOptions()).wait()
    other = (rank + 1) % RANKS
    got = torch.empty(SIZE)
    works = [backend.send([tensor * 10 + rank], other, 0), backend.recv([got], (rank - 1) % RANKS, 0)]
    for work in works:
        work.wait()
    sums[rank] = tensor.unique().tolist() + got.unique().tolist()
    backend.shutdown()


threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sums[0], sums[1], sums[2])
"""


@pytest.mark.cpu_only("of the transport between processes")
def test_ranks_that_are_threads_of_one_process_communicate(tmp_path: Path) -> None:
    (end,) = run_script(SCRIPT, 1, tmp_path)
    assert "[6.0, 62.0] [6.0, 60.0] [6.0, 61.0]" in end.output.splitlines(), end.output
