# SPDX-License-Identifier: Apache-2.0
"""When a group has other members, this package goes by their ranks, and not by those that torch lists."""

from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api._groups import BaguaProcessGroup, Communicator, from_torch_group
from members import Members, model
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel as DDP

SIZE = 3
pytestmark = pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has reconfigure from 2.14 on")


def _seen(group: BaguaProcessGroup) -> list[Any]:
    """Return the ranks of a group, and rank, size and sum of ranks of its communicator."""
    communicator = group.get_global_communicator()
    assert isinstance(communicator, Communicator)
    total = torch.tensor([communicator.rank() + 1])
    dist.all_reduce(total, group=communicator.torch_group)
    return [group.ranks, (communicator.rank(), communicator.nranks(), total.item())]


def _compatible_groups() -> tuple[list[Any], list[Any]]:
    members = Members()
    members.become(0, 1, 2)
    group = from_torch_group(None)
    before = _seen(group)
    members.wait_for_all("seen")
    after = []
    if members.me != 1:
        members.become(2, 0)
        after = _seen(group)
    return before, after


def test_communicators_are_those_of_the_members_that_there_are() -> None:
    results = run_ranks(SIZE, _compatible_groups)
    everybody = [0, 1, 2]
    assert [before for before, _ in results] == [[everybody, (rank, 3, 6)] for rank in range(3)]
    assert results[0][1] == [[0, 1], (1, 2, 3)]
    assert results[2][1] == [[0, 1], (0, 2, 3)]


def _turn_round() -> tuple[int, list[int], int]:
    group = dist.new_group([0, 1, 2])
    assert isinstance(group, dist.ProcessGroup)
    handles: list[Any] = [None] * SIZE
    dist.all_gather_object(handles, dist._get_reconfigure_handle(group))
    dist._reconfigure(7, handles[::-1], group=group).wait()
    handle = bagua.register_comm_hook(DDP(model(), process_group=group), "gradient_allreduce")
    states = handle.of_all_ranks().state_dict()
    each = [{"handle": {**handle.state_dict(), "rank": rank, "step": 7 + rank}} for rank in range(SIZE)]
    handle.of_all_ranks().load_state_dict({"ranks": each})
    return group.rank(), [state["handle"]["rank"] for state in states["ranks"]], handle.state_dict()["step"]


def test_the_states_of_all_ranks_go_by_the_ranks_that_there_are() -> None:
    assert run_ranks(SIZE, _turn_round) == [(2, [], 9), (1, [], 8), (0, [0, 1, 2], 7)]
