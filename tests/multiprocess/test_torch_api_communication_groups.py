# SPDX-License-Identifier: Apache-2.0
"""Initialisation, process groups and communicators of bagua.torch_api."""

import gc
import os
import re
import threading
from pathlib import Path
from typing import Any

import bagua.torch_api as api
import bagua_core
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api import _groups, communication
from bagua.torch_api.communication import BaguaProcessGroup, CommMember, Communicator
from bagua.torch_api.exceptions import RepeatedInitializationError
from holdings import wait_for
from ranks import on_new_ranks, on_ranks, run_ranks
from script_ranks import free_port
from torch_api_calls import started


def _sum_over(comm: Any, value: float) -> float:
    tensor = torch.tensor([value])
    api.allreduce(tensor, comm=comm)
    return tensor.item()


def _destroy(group: BaguaProcessGroup) -> None:
    """Leave the ranks, which other tests use too, as they were."""
    if dist.get_rank() not in group.ranks:
        return
    dist.destroy_process_group(group.torch_group)


@on_new_ranks(2)
def test_initialisation_from_the_environment_again_after_destruction() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    ports = [free_port(), free_port()]
    dist.broadcast_object_list(ports)
    for port in ports:
        # To begin again, the group is destroyed as one of torch is.
        dist.destroy_process_group()
        assert not api.is_initialized()
        with pytest.raises(RuntimeError, match=r"call bagua\.torch_api\.init_process_group"):
            api.allreduce(torch.ones(1))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        api.init_process_group()
        assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ("bagua", rank, size)
        # The store ends with rank 0's group: not before the other rank has made its own.
        assert _sum_over(None, 1.0) == size


def _initialise_twice() -> None:
    assert dist.is_initialized()
    assert not api.is_initialized()
    api.init_process_group()
    assert api.is_initialized()
    with pytest.raises(RepeatedInitializationError, match="initialize the default process group twice!"):
        api.init_process_group()
    assert issubclass(RepeatedInitializationError, RuntimeError)
    group = _groups.default_group()
    assert group.torch_group is dist.group.WORLD
    assert group.ranks == [0, 1]
    assert _sum_over(None, 1.0) == 2


@pytest.mark.parametrize("backend", ["bagua", "gloo"])
def test_group_of_torch_is_taken_over_once(backend: str) -> None:
    run_ranks(2, _initialise_twice, backend=backend)


@on_ranks(3)
def test_ranks_are_those_inside_the_communicator() -> None:
    rank, size = started()
    members = [size - 1, 0]
    group = communication.new_group(members)
    assert group.ranks == sorted(members)
    comm = group.get_global_communicator()
    tensor = torch.tensor([float(rank)])
    if rank in members:
        assert isinstance(comm, bagua_core.BaguaSingleCommunicatorPy), "the class that scripts import"
        assert (comm.rank(), comm.nranks(), comm.check_abort()) == (sorted(members).index(rank), 2, False)
        assert dist.get_process_group_ranks(group.torch_group) == sorted(members)
        assert communication.from_torch_group(group.torch_group) is group
    else:
        assert comm is CommMember.NON_COMM_MEMBER
        with pytest.raises(RuntimeError, match=rf"rank {rank} is not in this group"):
            _ = group.torch_group
    # Rank 1 inside the group.
    api.broadcast(tensor, 1, comm)
    assert tensor.item() == (size - 1 if rank in members else rank)
    _destroy(group)


@on_ranks(2)
def test_ranks_outside_a_communicator_do_nothing() -> None:
    """Every operation, with arguments that would be wrong for a member."""
    none: Any = CommMember.NON_COMM_MEMBER
    tensor: Any = torch.tensor([1.0, 2.0])
    for operation, arguments in (
        (api.allreduce, (tensor,)),
        (api.allreduce, (tensor, torch.zeros(5))),
        (api.allreduce_inplace, (tensor, "no op")),
        (api.reduce, (tensor, 99)),
        (api.reduce_inplace, (tensor, 99)),
        (api.broadcast, (tensor, 99)),
        (api.barrier, ()),
    ):
        assert operation(*arguments, comm=none) is None, operation
    assert tensor.tolist() == [1.0, 2.0]


@on_ranks(2)
def test_wrong_ranks_and_names_are_refused() -> None:
    _, size = started()
    for ranks in ([], [0, 0], [0, size], [-1]):
        with pytest.raises(ValueError, match=f"one or more of 0 to {size - 1}, each once, got"):
            communication.new_group(ranks)
    with pytest.raises(TypeError, match="got 'world'"):
        communication.from_torch_group("world")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="communicator of a BaguaProcessGroup, got"):
        api.allreduce(torch.ones(1), comm=_groups.default_group())  # type: ignore[call-overload]
    assert _sum_over(None, 1.0) == size


@on_ranks(3)
def test_group_over_a_group_of_torch() -> None:
    rank, size = started()
    group: Any = dist.new_group([0, size - 1])
    # As in the original's tests: all ranks call, members or not.
    over = communication.from_torch_group(group)
    comm = over.get_global_communicator()
    if rank not in (0, size - 1):
        assert over.ranks == []
        assert comm is CommMember.NON_COMM_MEMBER
        return
    assert isinstance(comm, Communicator)
    assert (comm.rank(), comm.nranks()) == (dist.get_rank(group), dist.get_world_size(group))
    assert comm.torch_group is group
    assert over.group_name == group.group_name
    assert communication.from_torch_group(group) is over
    assert over.get_global_communicator() is comm
    assert _sum_over(comm, float(rank)) == sum({0, size - 1})
    # The cache does not keep a group alive that torch has let go of.
    dist.destroy_process_group(group)
    del group
    gc.collect()
    with pytest.raises(RuntimeError, match="was destroyed"):
        _ = comm.torch_group
    del over
    gc.collect()


@on_new_ranks(2)
def test_abort_ends_what_is_in_flight_and_leaves_other_groups_alone() -> None:
    rank, _ = started()
    comm = communication.new_group().get_global_communicator()
    assert isinstance(comm, Communicator)
    assert comm.device_id() == (torch.cuda.current_device() if torch.cuda.is_available() else -1)
    assert not comm.check_abort()
    if rank == 0:
        # Waits for a peer that does not call; another thread ends it.
        failures: list[Exception] = []

        def wait() -> None:
            try:
                api.allreduce(torch.ones(1000), comm=comm)
            except RuntimeError as error:
                failures.append(error)

        # Of the backend: before torch 2.14 a group asks only backends whose names it knows.
        backend: Any = comm.torch_group._get_backend(torch.device("cpu"))
        before = backend._get_sequence_number_for_group()
        thread = threading.Thread(target=wait)
        thread.start()
        assert wait_for(lambda: backend._get_sequence_number_for_group() > before)
        assert thread.is_alive()
        comm.abort()
        thread.join(timeout=30)
        assert len(failures) == 1
        comm.abort()
    api.barrier()
    if rank == 1:
        comm.abort()
    assert comm.check_abort()
    with pytest.raises(RuntimeError):
        api.allreduce(torch.ones(1), comm=comm)
    # Others are not touched.
    assert _sum_over(None, 1.0) == 2


@on_new_ranks(2)
def test_example_of_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "torch_api.md").read_text()
    (example,) = re.findall(r"^## Collectives\n\n```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    scope: dict[str, Any] = {}
    exec(example, scope)
    assert scope["summed"].tolist() == [8, 12]
    # The maximum of what both have.
    if scope["rank"] == 1:
        assert scope["tensor"].tolist() == [4, 6]
