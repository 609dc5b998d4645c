# SPDX-License-Identifier: Apache-2.0
"""A process ends in time, whatever its groups are in."""

import os
import subprocess
import sys
import time
from pathlib import Path

# Rank 0 ends while each of its groups waits for rank 1, which makes no call and stays until it is killed.
ENDING = """
import sys, time
from datetime import timedelta
import bagua, torch, torch.distributed as dist
rank, path = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(path, 2)
dist.init_process_group("bagua", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
groups = [dist.new_group() for _ in range(4)]
for group in groups:
    dist.all_reduce(torch.ones(4), group=group)
if rank == 1:
    time.sleep(120)
works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in groups]
print(time.monotonic(), flush=True)
"""


def test_groups_that_wait_for_nobody_delay_the_end_of_a_process_once(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ENDING, str(rank), str(tmp_path / "store")],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        output, _ = ranks[0].communicate(timeout=120)
        took = time.monotonic() - float(output)
    finally:
        ranks[1].kill()
        ranks[1].communicate()
    # Five seconds for each would be twenty.
    assert 4 < took < 12
