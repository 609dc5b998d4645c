# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: collectives and whole steps of DDP, captured once and replayed."""

import time
from typing import Any

import bagua
import torch
import torch.distributed as dist
from check import assert_same_on_all_ranks, check
from devices import randn
from hooked_models import SMALL_BUCKETS, new_group, perceptron
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

# What PyTorch asks for before DDP is captured: the reducer rebuilds its buckets and looks at its own times until then.
WARM_UP = 11
REPLAYS = 4
# What the ends of a group's communicators may take, and busy processes beside that.
CLOSE_SECONDS = 5.0
SLACK_SECONDS = 15.0


@check(sizes=(1, 2, 3, 4), cuda_only=True)
def captured_collectives_are_repeated_by_a_replay() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    given, gathered = torch.zeros(1003), torch.zeros(size * 1003)
    reduced = torch.empty_like(given)

    def step() -> None:
        reduced.copy_(given)
        work: Any = dist.all_reduce(reduced, async_op=True)
        dist.all_gather_into_tensor(gathered, given)
        work.wait()
        reduced.mul_(2)

    step()  # communicators are made outside of a capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn in range(REPLAYS):
        given.fill_(float(rank + turn))
        graph.replay()
        torch.cuda.synchronize()
        assert (reduced == 2 * (size * (size - 1) / 2 + size * turn)).all()
        assert torch.equal(gathered, torch.arange(float(size)).repeat_interleave(1003) + turn)
    dist.all_reduce(reduced)  # and outside of the graph the group goes on


@check(sizes=(1, 2, 3, 4), seconds=30, cuda_only=True)
def group_can_be_destroyed_while_a_graph_holds_its_calls() -> str:
    """NCCL waits for such graphs, also when it aborts; who destroys a group does not."""
    tensor = torch.ones(1003)
    graph = torch.cuda.CUDAGraph()
    with new_group() as group:
        dist.all_reduce(tensor, group=group)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            dist.all_reduce(tensor, group=group)
        graph.replay()
        torch.cuda.synchronize()
        begin = time.monotonic()
    seconds = time.monotonic() - begin
    dist.all_reduce(tensor)  # of a group that knows nothing of it
    torch.cuda.synchronize()
    assert seconds < CLOSE_SECONDS + SLACK_SECONDS
    return f"{seconds:.2f} s"


def _batch(step: int) -> Tensor:
    return randn(6, 23, seed=1000 * step + dist.get_rank())


def _hooked(algorithm: str, options: dict[str, Any]) -> DDP:
    ddp = DDP(perceptron(), gradient_as_bucket_view=True, **SMALL_BUCKETS)
    bagua.register_comm_hook(ddp, algorithm, **options)
    return ddp


def _step(ddp: DDP, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    ddp(batch).square().mean().backward()
    optimizer.step()


@check(
    {"gradient_allreduce": ("gradient_allreduce", {}), "bytegrad": ("bytegrad", {"hierarchical": False})},
    seconds=25,
    cuda_only=True,
)
def captured_step_of_ddp_trains_as_an_eager_one(algorithm: str, options: dict[str, Any]) -> None:
    """After the same batches, with every step issued and with the last ones replayed."""
    eager = _hooked(algorithm, options)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.05)
    for step in range(WARM_UP + REPLAYS):
        _step(eager, optimizer, _batch(step))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    batch = _batch(0)
    with torch.cuda.stream(side):
        ddp = _hooked(algorithm, options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for step in range(WARM_UP):
            batch.copy_(_batch(step))
            _step(ddp, optimizer, batch)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _step(ddp, optimizer, batch)
    for step in range(WARM_UP, WARM_UP + REPLAYS):
        batch.copy_(_batch(step))
        graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(eager.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
    assert_same_on_all_ranks(ddp.parameters())


@check(seconds=25, cuda_only=True)
def capture_of_a_step_with_residuals_is_refused() -> str:
    """A replay would always read the residuals that the captured step read. Last: it breaks a capture."""
    ddp = _hooked("quantized_allreduce", {"hierarchical": False, "exact": ()})
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    batch = _batch(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            _step(ddp, optimizer, batch)
    torch.cuda.synchronize()
    error: BaseException | None = None
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            _step(ddp, optimizer, batch)
    except (RuntimeError, ValueError) as caught:
        error = caught
    # What the end of a broken capture says comes on top of the cause.
    messages = []
    while error is not None:
        messages.append(str(error))
        error = error.__context__
    for message in messages:
        if "quantized_allreduce" in message and ("captur" in message.lower() or "graph" in message.lower()):
            return f"refused: {message.splitlines()[0]}"
    raise AssertionError(f"nothing refuses it: {messages}")
