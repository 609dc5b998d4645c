# SPDX-License-Identifier: Apache-2.0
"""Every operation under torch.inference_mode(), where evaluation loops run, and on inference tensors outside of it.

Torch lets these be changed in that mode only, and the mode belongs to a thread; ours may run an operation on the
caller's thread or on another.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from devices import DEVICE, settle
from hooked_models import same
from ranks import on_ranks
from reference import named
from torch import Tensor

pytestmark = pytest.mark.any_device

# What to wait for (None: it is over), and the tensors that the operation writes.
Begun = tuple[Any, list[Tensor]]


class _Operations:
    """Each public method begins one operation, on inference tensors or on ordinary ones."""

    def __init__(self, on_inference_tensors: bool) -> None:
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._peer = (self._rank + 1) % self._size
        self._on_inference_tensors = on_inference_tensors

    def _full(self, shape: tuple[int, ...], value: float) -> Tensor:
        with torch.inference_mode(self._on_inference_tensors):
            return torch.full(shape, value)

    def _own(self, *shape: int) -> Tensor:
        return self._full(shape or (2, 3), self._rank + 1.0)

    def _output(self, *shape: int) -> Tensor:
        return self._full(shape or (2, 3), 0.0)

    def _outputs(self) -> list[Tensor]:
        return [self._output() for _ in range(self._size)]

    def _inputs(self) -> list[Tensor]:
        return [self._full((2, 3), 10.0 * self._rank + peer) for peer in range(self._size)]

    def all_reduce(self, later: bool) -> Begun:
        tensor = self._own()
        return dist.all_reduce(tensor, async_op=later), [tensor]

    def all_reduce_of_another_memory_format(self, later: bool) -> Begun:
        with torch.inference_mode(self._on_inference_tensors):
            tensor = self._own(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
        return dist.all_reduce(tensor, async_op=later), [tensor]

    def all_reduce_of_sparse_tensors(self, later: bool) -> Begun:
        with torch.inference_mode(self._on_inference_tensors):
            tensor = torch.sparse_coo_tensor(torch.tensor([[self._rank]]), torch.ones(1), (self._size,))
        return dist.all_reduce(tensor, async_op=later), [tensor]

    def all_reduce_coalesced(self, later: bool) -> Begun:
        tensors = [self._own(), self._own(5)]
        return dist.all_reduce_coalesced(tensors, async_op=later), tensors

    def broadcast(self, later: bool) -> Begun:
        tensor = self._own()
        return dist.broadcast(tensor, 0, async_op=later), [tensor]

    def reduce(self, later: bool) -> Begun:
        tensor = self._own()
        return dist.reduce(tensor, 0, async_op=later), [tensor] if self._rank == 0 else []

    def all_gather(self, later: bool) -> Begun:
        outputs = self._outputs()
        return dist.all_gather(outputs, self._own(), async_op=later), outputs

    def all_gather_of_several_sizes(self, later: bool) -> Begun:
        outputs = [self._output(rank + 1) for rank in range(self._size)]
        return dist.all_gather(outputs, self._own(self._rank + 1), async_op=later), outputs

    def all_gather_into_tensor(self, later: bool) -> Begun:
        output = self._output(2 * self._size, 3)
        return dist.all_gather_into_tensor(output, self._own(), async_op=later), [output]

    def all_gather_coalesced(self, later: bool) -> Begun:
        outputs = [[self._output(), self._output(5)] for _ in range(self._size)]
        work = dist.all_gather_coalesced(outputs, [self._own(), self._own(5)], async_op=later)
        return work, [tensor for pair in outputs for tensor in pair]

    def gather(self, later: bool) -> Begun:
        outputs = self._outputs() if self._rank == 0 else None
        return dist.gather(self._own(), outputs, async_op=later), outputs or []

    def scatter(self, later: bool) -> Begun:
        output = self._output()
        return dist.scatter(output, self._inputs() if self._rank == 0 else None, async_op=later), [output]

    def reduce_scatter(self, later: bool) -> Begun:
        output = self._output()
        return dist.reduce_scatter(output, self._inputs(), async_op=later), [output]

    def reduce_scatter_of_several_sizes(self, later: bool) -> Begun:
        output = self._output(self._rank + 1)
        inputs = [self._own(rank + 1) for rank in range(self._size)]
        return dist.reduce_scatter(output, inputs, async_op=later), [output]

    def reduce_scatter_tensor(self, later: bool) -> Begun:
        output = self._output()
        return dist.reduce_scatter_tensor(output, self._own(2 * self._size, 3), async_op=later), [output]

    def all_to_all(self, later: bool) -> Begun:
        outputs = self._outputs()
        return dist.all_to_all(outputs, self._inputs(), async_op=later), outputs

    def all_to_all_single(self, later: bool) -> Begun:
        output = self._output(2 * self._size, 3)
        return dist.all_to_all_single(output, self._own(2 * self._size, 3), async_op=later), [output]

    def several_as_one(self, later: bool) -> Begun:
        outputs = [self._output(2 * self._size, 3), self._output(5 * self._size)]
        with dist._coalescing_manager(async_ops=later) as manager:  # type: ignore[no-untyped-call,unused-ignore]
            dist.all_gather_into_tensor(outputs[0], self._own())
            dist.all_gather_into_tensor(outputs[1], self._own(5))
        return manager if later else None, outputs

    def message(self, later: bool) -> Begun:
        received = self._output()
        calls = [lambda: dist.isend(self._own(), self._peer), lambda: dist.irecv(received, self._peer)]
        if not later:
            calls = [lambda: dist.send(self._own(), self._peer), lambda: dist.recv(received, self._peer)]
        works: list[Any] = [call() for call in (calls if self._rank == 0 else reversed(calls))]
        return works if later else None, [received]

    def messages_together(self, later: bool) -> Begun:
        received = self._output()
        operations = [dist.P2POp(dist.isend, self._own(), self._peer), dist.P2POp(dist.irecv, received, self._peer)]
        return dist.batch_isend_irecv(operations), [received]

    def message_from_anyone(self, later: bool) -> Begun:
        received = self._output()
        work = dist.isend(self._own(), self._peer)
        dist.recv(received)
        return work, [received]

    def barrier(self, later: bool) -> Begun:
        return dist.barrier(async_op=later), []


# NCCL takes no message from just anyone.
CPU_ONLY = {"message_from_anyone"}
NAMES = [name for name in vars(_Operations) if not name.startswith("_") and not (DEVICE == "cuda" and name in CPU_ONLY)]


@contextmanager
def _behind_another(late: int | None) -> Iterator[None]:
    """Where another operation is unfinished, because rank `late` is late for it."""
    if late is None:
        yield
        return
    if dist.get_rank() == late:
        time.sleep(0.003)
    work: Any = dist.all_reduce(torch.ones(100_000), async_op=True)
    yield
    work.wait()


def _finish(work: Any) -> None:
    for one in work if isinstance(work, list) else [work]:
        if one is not None:
            one.wait()
    settle()


def _written(name: str, in_mode: bool, on_inference_tensors: bool, later: bool, late: int | None) -> list[Tensor]:
    begin: Callable[[bool], Begun] = getattr(_Operations(on_inference_tensors), name)
    with torch.inference_mode(in_mode), _behind_another(late):
        work, outputs = begin(later)
        _finish(work)
    assert all(output.is_inference() == on_inference_tensors for output in outputs)
    return [output.to_dense() if output.is_sparse else output for output in outputs]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@on_ranks(2)
def test_every_operation_writes_in_the_mode_and_on_its_tensors_what_it_does_outside() -> None:
    """What they write outside is asked elsewhere."""
    for turn, name in enumerate(NAMES):
        expected = _written(name, False, False, False, None)
        modes = [(True, True), (True, False), (False, True)]
        for (in_mode, on_inference_tensors), later, late in itertools.product(modes, (False, True), (None, turn % 2)):
            with named(f"{name} {in_mode=} {on_inference_tensors=} {later=} {late=}"):
                written = _written(name, in_mode, on_inference_tensors, later, late)
                assert same(written, expected)
