# SPDX-License-Identifier: Apache-2.0
"""The helper itself, over stock Gloo: it must report a failure, a death and a hang for what they are."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailure, RankPool, run_ranks
from script_ranks import run_script


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3, "gloo") as pool:
        yield pool


def _sum_of_ranks(factor: int) -> float:
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor)
    return factor * tensor.item()


def _process_id() -> int:
    return os.getpid()


def _threads_of_the_server() -> int:
    return len(os.listdir(f"/proc/{os.getppid()}/task"))


def _variable(name: str) -> str | None:
    return os.environ.get(name)


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("planted")
    dist.barrier()


def _exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    with contextlib.suppress(RuntimeError):
        dist.barrier()


def _hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        threading.Event().wait()


def _last_fails_first() -> None:
    world_size = dist.get_world_size()
    deadline = time.monotonic() + 0.3 * (world_size - 1 - dist.get_rank())
    while time.monotonic() < deadline:
        pass
    raise ValueError("planted")


def _exit_with_nine() -> None:
    os._exit(9)


def _crash_at_exit() -> None:
    mock.patch.object(dist, "destroy_process_group", _exit_with_nine).start()


def test_every_rank_returns_its_result(pool: RankPool) -> None:
    assert pool.run(_sum_of_ranks, 2) == [6.0, 6.0, 6.0]


def test_ranks_are_kept_between_runs(pool: RankPool) -> None:
    first = pool.run(_process_id)
    assert len(set(first)) == 3
    assert pool.run(_process_id) == first


def test_ranks_are_forked_from_a_process_without_threads(pool: RankPool) -> None:
    assert pool.run(_threads_of_the_server) == [1, 1, 1]


def test_environment_reaches_the_ranks() -> None:
    assert run_ranks(2, _variable, "PLANTED", backend="gloo", env={"PLANTED": "yes"}) == ["yes", "yes"]
    assert run_ranks(2, _variable, "PLANTED", backend="gloo", env={"PLANTED": ["one", "two"]}) == ["one", "two"]
    assert "PLANTED" not in os.environ


def test_the_failing_rank_is_named_and_the_next_run_works(pool: RankPool) -> None:
    before = pool.run(_process_id)
    with pytest.raises(RankFailure, match=r"rank 1 of 3 .gloo. failed first(?s:.*)ValueError: planted") as failure:
        pool.run(_fail_on, 1)
    assert failure.value.rank == 1
    assert set(pool.run(_process_id)).isdisjoint(before)


def test_the_first_of_several_failures_is_reported(pool: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        pool.run(_last_fails_first)
    assert failure.value.rank == 2


def test_the_death_of_a_rank_is_reported(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"rank 2 of 3 .gloo. failed first .*exit code 7"):
        pool.run(_exit_on, 2)


def test_a_rank_may_be_expected_to_die(pool: RankPool) -> None:
    assert pool.run(_exit_on, 2, dying={2}) == [None, None, None]
    with pytest.raises(RankFailure, match=r"rank 0 .* was to die"):
        pool.run(_process_id, dying={0})


def test_a_hung_rank_is_named_with_its_stack(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"rank 1 of 3(?s:.*)Timeout(?s:.*)in _hang_on"):
        pool.run(_hang_on, 1, timeout=2.0)


def test_a_crash_while_the_group_is_destroyed_is_reported() -> None:
    pool = RankPool(2, "gloo")
    pool.run(_crash_at_exit)
    with pytest.raises(RankFailure, match=r"rank 0 of 2 .gloo. ended with exit code 9"):
        pool.close()


def test_a_local_function_is_refused(pool: RankPool) -> None:
    with pytest.raises(ValueError, match=r"cannot be found by another process"):
        pool.run(lambda: None)


def test_a_script_that_ends_otherwise_than_expected_or_hangs_is_shown_with_its_stack(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"rank 1 ended with 3"):
        run_script("import os; raise SystemExit(3 * int(os.environ['RANK']))", 2, tmp_path)
    with pytest.raises(AssertionError, match=r"rank 0 ended with -6(?s:.*)line 1 in .module."):
        run_script("import time; time.sleep(60)", 1, tmp_path, timeout=1.0)
