# SPDX-License-Identifier: Apache-2.0
"""Who can reach the memory that ranks share, and who can join them. docs/security.md promises what is tested here."""

import os
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run_ranks

_NOBODY = 65534


def _segments_in_use() -> list[str]:
    return [line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/bagua-" in line]


@on_ranks(3)
def test_segments_have_no_name_once_the_first_collective_is_over() -> None:
    dist.all_reduce(torch.ones(10))
    segments = _segments_in_use()
    assert segments, "nothing is mapped: this test is about shared memory"
    assert all(segment.endswith(" (deleted)") for segment in segments), segments


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@on_ranks(2)
def test_another_user_cannot_reach_the_memory_through_proc() -> None:
    dist.all_reduce(torch.ones(10))
    assert _segments_in_use()
    for door in ("fd", "map_files"):
        path = f"/proc/{os.getpid()}/{door}"
        if os.path.exists(path):
            asked = subprocess.run(["ls", path], user=_NOBODY, group=_NOBODY, extra_groups=[], capture_output=True)
            assert asked.returncode != 0, f"user {_NOBODY} can look into {path}"
            assert b"ermission denied" in asked.stderr, asked.stderr


def _join(file: str, jobs: list[tuple[str, int]], timeout: float) -> list[float] | str:
    """Come as another member of another job, all with the same store: what a sum over the job is, or the error."""
    job, rank = jobs[dist.get_rank()]
    dist.destroy_process_group()
    store = dist.PrefixStore(job, dist.FileStore(file, -1))  # type: ignore[attr-defined]
    limit = timedelta(seconds=timeout)
    try:
        dist.init_process_group("bagua", store=store, rank=rank, world_size=2, timeout=limit)
    except Exception as error:
        return str(error)
    tensor = torch.full((1000,), float(rank + 1))
    dist.all_reduce(tensor)
    sums: list[float] = tensor.unique().tolist()
    return sums


def test_a_process_with_another_job_id_cannot_join(tmp_path: Path) -> None:
    jobs = [("job-1", 0), ("job-2", 1)]
    errors = run_ranks(2, _join, str(tmp_path / "store"), jobs, 3.0)
    for rank, error in enumerate(errors):
        assert isinstance(error, str), f"rank {rank} was let in, and got {error}"
        assert f"rank {1 - rank}" in error


def test_two_jobs_of_one_store_do_not_mix(tmp_path: Path) -> None:
    jobs = [("job-1", 0), ("job-1", 1), ("job-2", 0), ("job-2", 1)]
    assert run_ranks(4, _join, str(tmp_path / "store"), jobs, 60.0) == [[3.0]] * 4
