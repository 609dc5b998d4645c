# SPDX-License-Identifier: Apache-2.0
"""Who can reach the memory that ranks share, and who can join them. docs/security.md promises what is tested here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

_NOBODY = 65534


def _segments_in_use() -> list[str]:
    return [line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/bagua-" in line]


def _use_shared_memory() -> None:
    dist.all_reduce(torch.ones(10))
    segments = _segments_in_use()
    assert segments, "nothing is mapped: this test is about shared memory"
    assert all(segment.endswith(" (deleted)") for segment in segments), segments


def test_segments_have_no_name_once_the_first_collective_is_over(peers: RankPool) -> None:
    peers.run(_use_shared_memory)


def _ask_as_nobody() -> None:
    _use_shared_memory()
    for door in ("fd", "map_files"):
        path = f"/proc/{os.getpid()}/{door}"
        if os.path.exists(path):
            asked = subprocess.run(["ls", path], user=_NOBODY, group=_NOBODY, extra_groups=[], capture_output=True)
            assert asked.returncode != 0, f"user {_NOBODY} can look into {path}"
            assert b"ermission denied" in asked.stderr, asked.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_reach_the_memory_through_proc(rank_pools: dict[int, RankPool]) -> None:
    rank_pools[2].run(_ask_as_nobody)


_MEMBER_OF_A_JOB = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

file, job, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = dist.PrefixStore(job, dist.FileStore(file, -1))
dist.init_process_group("bagua", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=float(sys.argv[4])))
tensor = torch.full((1000,), float(rank + 1))
dist.all_reduce(tensor)
print(job, tensor.unique().tolist())
"""


def _members(folder: Path, jobs: list[tuple[str, int]], timeout: float) -> list[tuple[int, str]]:
    """Exit status and output of processes that come as rank `rank` of `job`, all with the same store."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _MEMBER_OF_A_JOB, str(folder / "store"), job, str(rank), str(timeout)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for job, rank in jobs
    ]
    results = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=120)
            results.append((process.returncode, output))
    finally:
        for process in processes:
            process.kill()
    return results


def test_a_process_with_another_job_id_cannot_join(tmp_path: Path) -> None:
    results = _members(tmp_path, [("job-1", 0), ("job-2", 1)], timeout=4)
    for status, output in results:
        assert status != 0
        assert "rank" in output
        assert "[3.0]" not in output


def test_two_jobs_of_one_store_do_not_mix(tmp_path: Path) -> None:
    results = _members(tmp_path, [("job-1", 0), ("job-1", 1), ("job-2", 0), ("job-2", 1)], timeout=60)
    assert [status for status, _ in results] == [0, 0, 0, 0], results
    assert [output.splitlines()[-1] for _, output in results] == ["job-1 [3.0]"] * 2 + ["job-2 [3.0]"] * 2
