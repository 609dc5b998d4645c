# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: collectives and whole steps of DDP, captured once and replayed."""

import time
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from devices import randn
from hooked_models import SMALL_BUCKETS, new_group, perceptron
from ranks import RankPool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = [pytest.mark.any_device, pytest.mark.cuda_only]

# What PyTorch asks for before DDP is captured: the reducer rebuilds its buckets and looks at its own times until then.
WARM_UP = 11
REPLAYS = 4
# What the ends of a group's communicators may take, and busy processes beside that.
CLOSE_SECONDS = 5.0
SLACK_SECONDS = 15.0


def _collectives_in_a_graph() -> None:
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


def test_captured_collectives_are_repeated_by_a_replay(ranks: RankPool) -> None:
    ranks.run(_collectives_in_a_graph)


def _group_destroyed_before_its_graph() -> float:
    """Seconds that it took."""
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
    return seconds


def test_a_group_can_be_destroyed_while_a_graph_holds_its_calls(ranks: RankPool) -> None:
    """NCCL waits for such graphs, also when it aborts; who destroys a group does not."""
    assert all(seconds < CLOSE_SECONDS + SLACK_SECONDS for seconds in ranks.run(_group_destroyed_before_its_graph))


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


def _weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def _captured_step(algorithm: str, options: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Weights after the same batches, with every step issued and with the last ones replayed."""
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
    return _weights(eager), _weights(ddp)


@pytest.mark.parametrize(
    ("algorithm", "options"), [("gradient_allreduce", {}), ("bytegrad", {"hierarchical": False})], ids=str
)
def test_a_captured_step_of_ddp_trains_as_an_eager_one(
    peers: RankPool, algorithm: str, options: dict[str, Any]
) -> None:
    results = peers.run(_captured_step, algorithm, options, timeout=120.0)
    for eager, replayed in results:
        for one, other in zip(eager, replayed, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
        assert all(map(torch.equal, replayed, results[0][1]))


def _capture_of_a_step_with_residuals() -> None:
    ddp = _hooked("quantized_allreduce", {"hierarchical": False})
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    batch = _batch(0)
    for _ in range(2):
        _step(ddp, optimizer, batch)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="cannot be captured in a CUDA"):
        _step(ddp, optimizer, batch)
    dist.all_reduce(batch)  # the group goes on
    torch.cuda.synchronize()


def test_a_step_with_error_feedback_refuses_to_be_captured(ranks: RankPool) -> None:
    """A replay would read the same residuals each time, and never send what it left."""
    ranks.run(_capture_of_a_step_with_residuals)
