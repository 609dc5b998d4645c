# SPDX-License-Identifier: Apache-2.0
"""Where ranks are placed, for NCCL versions and numbers of GPUs that this machine need not have."""

import runpy
from pathlib import Path

import pytest
from gpus import NO_GPU, gpu_count, placement

OLD, NEW = (2, 28, 9), (2, 30, 7)


@pytest.mark.parametrize("nccl", [OLD, NEW], ids=str)
@pytest.mark.parametrize(("gpus", "ranks"), [(1, 1), (2, 2), (8, 4)])
def test_ranks_have_a_gpu_each_where_there_are_enough(nccl: tuple[int, ...], gpus: int, ranks: int) -> None:
    placed = placement(nccl, gpus, ranks)
    assert placed.gpus == list(range(ranks))
    assert placed.env == [{}] * ranks


@pytest.mark.parametrize(("gpus", "share"), [(1, False), (3, False), (8, True)])
def test_too_many_ranks_share_the_first_gpu_by_the_option_of_new_nccl(gpus: int, share: bool) -> None:
    placed = placement(NEW, gpus, 4, share=share)
    assert placed.gpus == [0] * 4
    assert placed.env == [{"NCCL_MULTI_RANK_GPU_ENABLE": "1"}] * 4
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30.7)" in placed.how


@pytest.mark.parametrize(("gpus", "share"), [(1, False), (3, False), (8, True)])
def test_old_nccl_takes_ranks_that_share_for_hosts_that_talk_over_loopback(gpus: int, share: bool) -> None:
    placed = placement(OLD, gpus, 4, share=share)
    assert placed.gpus == [0] * 4
    assert len({env["NCCL_HOSTID"] for env in placed.env}) == 4
    assert {env["NCCL_SOCKET_IFNAME"] for env in placed.env} == {"lo"}
    assert {env["NCCL_NET"] for env in placed.env} == {"Socket"}
    assert {env["NCCL_PROTO"] for env in placed.env} == {"Simple"}
    assert all("NCCL_MULTI_RANK_GPU_ENABLE" not in env for env in placed.env)
    assert "NCCL_HOSTID" in placed.how


def test_one_rank_shares_with_nobody() -> None:
    assert placement(OLD, 1, 1, share=True).env == [{}]


def test_without_a_gpu_nothing_is_placed() -> None:
    with pytest.raises(ValueError, match="no GPU for 2 ranks"):
        placement(NEW, 0, 2)


@pytest.mark.skipif(gpu_count() > 0, reason="there is a GPU")
def test_the_command_line_says_that_nothing_was_run_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(Path(__file__).with_name("gpus.py")), run_name="__main__")
    assert ended.value.code == NO_GPU
    (line,) = capsys.readouterr().out.splitlines()
    assert "NOTHING WAS RUN for want of a GPU" in line
