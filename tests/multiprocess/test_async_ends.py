# SPDX-License-Identifier: Apache-2.0
"""async at the end of a process or a group; its weights of every dtype; buffers."""

from pathlib import Path
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from async_drift import LENGTH, ROUNDS, SECONDS, Drift
from hooked_models import Leaves, everywhere, logged, new_group, same_everywhere
from ranks import on_ranks, run_ranks
from script_ranks import run_script
from slowness import Moment
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

# --- the end of a process ---

# A rank notices in two seconds that the other is gone. It would wait ten for one that is not at its end.
WAIT_SECONDS = 7.0

# The store is rank 0's, and ends with it.
_SCRIPT = """
import os, sys, time
import bagua, torch, torch.distributed as dist
dist.init_process_group("{backend}")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
handle = bagua.register_comm_hook(model, "async", optimizer=optimizer, sync_interval_ms=1)

def train(more_rounds=dist.get_rank()):
    # Another number of steps, and of rounds that have begun, on each rank.
    while handle.stats()["rounds"] < 3 + more_rounds:
        optimizer.zero_grad()
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()

def busy(process="self"):
    # What its first thread has computed, or has been ready to.
    return sum(map(int, open(f"/proc/{{process}}/schedstat").read().split()[:2])) / 1e9

def leave():
    print("leaves", time.monotonic(), busy(), flush=True)

{body}
leave()
"""

_DESTROYS = "train(); dist.destroy_process_group()"
_DESTROYS_AFTER_AN_EXCEPTION = """
train()
leave()
leave = lambda: None
try:
    if dist.get_rank() == 1:
        raise ArithmeticError("planted")
finally:
    dist.destroy_process_group()
"""
_FORKS = """
train()
child = os.fork()
if child == 0:
    sys.exit(0)
begin, own = time.monotonic(), busy()
# What the kernel knows of the child stays until it is waited for. A child begins at zero.
assert os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT).si_status == 0
asleep = time.monotonic() - begin - busy(child) - (busy() - own)
assert asleep < 5, f"the child has waited for ranks, {asleep} s"
assert os.waitpid(child, 0)[1] == 0
"""
_RAISES = """
train()
leave()
leave = lambda: None
if dist.get_rank() == 1:
    raise ArithmeticError("planted")
"""


def _ends(
    body: str, tmp_path: Path, backend: str = "bagua", exit_codes: tuple[int, int] = (0, 0)
) -> tuple[list[str], float]:
    """The outputs, and for how long one rank at least had not ended while neither computed, nor was ready to.

    From the moment in which both were about to leave.
    """
    script = _SCRIPT.format(body=body, backend=backend)
    outputs, _, ends = zip(*run_script(script, 2, tmp_path, codes=exit_codes), strict=True)
    leaves = []
    for output in outputs:
        (line,) = [line for line in output.splitlines() if line.startswith("leaves ")]
        leaves.append(Moment(*map(float, line.split()[1:])))
    begin, end = max(moment.when for moment in leaves), max(moment.when for moment in ends)
    return list(outputs), end - begin - sum(last.busy - first.busy for first, last in zip(leaves, ends, strict=True))


@pytest.mark.parametrize("backend", ["bagua", pytest.param("gloo", marks=pytest.mark.long)])
@pytest.mark.parametrize("body", [_DESTROYS, _FORKS], ids=["destroys_its_groups", "exits_and_has_forked"])
def test_an_algorithm_that_nobody_aborts_ends_with_the_process(tmp_path: Path, body: str, backend: str) -> None:
    outputs, waited = _ends(body, tmp_path, backend)
    assert waited < WAIT_SECONDS
    for output in outputs:
        for trace in ("average_weights", "recvValue", "still at work", "terminate", "Traceback"):
            assert trace not in output, output


@pytest.mark.parametrize("body", [_DESTROYS_AFTER_AN_EXCEPTION, _RAISES], ids=["destroys_its_groups", "raises"])
def test_a_rank_that_ends_by_an_exception_waits_for_nobody(tmp_path: Path, body: str) -> None:
    outputs, waited = _ends(body, tmp_path, exit_codes=(0, 1))
    assert waited < WAIT_SECONDS
    assert "planted" in outputs[1]
    assert "still at work" not in outputs[1]
    when = " when its group was destroyed" if body == _DESTROYS_AFTER_AN_EXCEPTION else ""
    assert f"algorithm 'async' was still at work on rank 0{when}" in outputs[0]
    assert "handle.abort()" in outputs[0]


def test_an_algorithm_that_cannot_end_with_its_group_says_so(tmp_path: Path) -> None:
    # A script that has imported the name before bagua has this one.
    outputs, _ = _ends("train(0); dist.barrier(); dist.destroy_process_group.__wrapped__()", tmp_path)
    for rank, output in enumerate(outputs):
        assert f"algorithm 'async' was still at work on rank {rank} when its group was destroyed" in output


def _leave_by_an_exception(trained: Drift) -> None:
    with trained.handle:
        trained.steps_with_rounds(3)
        raise ArithmeticError("planted")


@on_ranks(2, timeout=SECONDS)
def test_a_block_that_ends_by_an_exception_waits_for_nobody() -> None:
    trained = Drift()
    with pytest.raises(ArithmeticError, match="planted"):
        _leave_by_an_exception(trained)
    # Nothing was ended: all go on.
    trained.steps_with_rounds(3)
    with trained.handle as handle:
        trained.steps_with_rounds(3)
        assert handle is trained.handle
    trained.agree()
    stopped = trained.rounds()
    trained.steps(3)
    assert trained.rounds() == stopped


@on_ranks(3, timeout=SECONDS)
def test_a_group_may_be_destroyed_without_abort() -> None:
    """The hook outlives its group and is let go in the middle of a round."""
    with new_group() as group:
        ddp = DDP(Leaves(LENGTH), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        bagua.register_comm_hook(ddp, "async", optimizer=optimizer, sync_interval_ms=1)
        for _ in range(7):
            ddp([torch.ones(LENGTH)]).backward()
            optimizer.step()
    del ddp, optimizer, group
    with new_group() as group:
        total = torch.ones(3)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [dist.get_world_size()] * 3


def _left_to_the_end_of_all_groups() -> Tensor:
    from torch.distributed import destroy_process_group

    group: Any = dist.new_group()
    ddp = DDP(Leaves(LENGTH), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    bagua.register_comm_hook(ddp, "async", optimizer=optimizer, sync_interval_ms=1)
    for _ in range(3):
        # A step later than the last round leaves the weights of the ranks apart.
        ddp([torch.full((LENGTH,), dist.get_rank() + 1.0)]).backward()
        optimizer.step()
    destroy_process_group(dist.group.WORLD)
    return torch.cat([p.detach() for p in ddp.parameters()])


def test_the_end_of_all_groups_is_that_of_an_algorithm_on_any_of_them() -> None:
    assert torch.equal(*run_ranks(2, _left_to_the_end_of_all_groups))


# --- weights and buffers ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@on_ranks(3, timeout=SECONDS)
def test_weights_of_every_dtype_converge(dtype: torch.dtype) -> None:
    trained = Drift(dtype)
    trained.steps(6)
    trained.gradient.zero_()  # from here on nothing pulls the ranks apart
    dist.barrier()
    # The first of these may have begun before, and the second on some of the ranks.
    trained.steps_with_rounds(8, ROUNDS)
    before = trained.copy()
    trained.handle.abort()
    mean = -6 * (dist.get_world_size() + 1) / 2
    # About fourteen rounds and six steps, each rounding numbers of at most 24 to the dtype.
    tolerance = 24 * 20 * torch.finfo(dtype).eps
    for weight in (before, trained.copy()):
        assert weight.dtype == dtype
        torch.testing.assert_close(weight.double(), torch.full((LENGTH,), mean).double(), rtol=0, atol=tolerance)
    assert same_everywhere(trained.weight)


@on_ranks(3, timeout=SECONDS)
def test_buffers_are_the_rank_s_own_until_abort() -> None:
    rank = dist.get_rank()
    torch.manual_seed(3)
    normalisation = nn.BatchNorm1d(4)
    model: Any = nn.Sequential(nn.Linear(5, 4), normalisation, nn.Linear(4, 2))
    model.register_buffer("own", torch.tensor(float(rank)))
    model._ddp_params_and_buffers_to_ignore = ["own"]
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with logged("") as log:
        handle = bagua.register_comm_hook(ddp, "async", optimizer=optimizer, sync_interval_ms=1)
    assert ("broadcast_buffers" in log.getvalue()) == (rank == 0), "one rank says it"
    generator = torch.Generator().manual_seed(rank)
    steps = 0
    # Broadcasting the buffers at a forward would wait for ranks that take no more.
    while steps < 6 + 4 * rank or handle.stats()["rounds"] < ROUNDS:
        optimizer.zero_grad()
        (ddp(torch.randn(8, 5, generator=generator) + rank).square().mean()).backward()
        optimizer.step()
        steps += 1
    before = torch.cat([buffer.reshape(-1).float() for buffer in normalisation.buffers()])
    handle.abort()
    after = torch.cat([buffer.reshape(-1).float() for buffer in normalisation.buffers()])
    of_ranks = everywhere(before)
    assert not torch.equal(of_ranks[0], of_ranks[1])
    assert torch.equal(after, of_ranks[0]), "those of rank 0"
    assert model.own == rank, "DDP is to ignore it"
    assert same_everywhere(*ddp.parameters())


@on_ranks(2, timeout=SECONDS)
def test_a_model_without_buffers_warns_of_nothing() -> None:
    with logged("") as log:
        Drift().handle.abort()
    assert not log.getvalue()


@on_ranks(3, timeout=SECONDS)
def test_frozen_weights_stay_what_they_are() -> None:
    """Weights without gradients are not exchanged; weights the optimizer leaves alone would be refused."""
    torch.manual_seed(3)
    frozen, trained = nn.Linear(5, 4), nn.Linear(4, 2)
    frozen.requires_grad_(False)
    ddp = DDP(nn.Sequential(frozen, trained))
    frozen.weight.fill_(dist.get_rank())
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    handle = bagua.register_comm_hook(ddp, "async", optimizer=optimizer, sync_interval_ms=1)
    while handle.stats()["rounds"] < ROUNDS:
        ddp(torch.full((3, 5), dist.get_rank() + 1.0)).sum().backward()
        optimizer.step()
    handle.abort()
    assert torch.equal(frozen.weight, torch.full((4, 5), float(dist.get_rank())))
    assert same_everywhere(trained.weight)
