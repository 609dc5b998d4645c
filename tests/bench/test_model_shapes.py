# SPDX-License-Identifier: Apache-2.0
"""`python -m bagua.bench --model`: algorithms on the shapes of a model."""

import time
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from bagua._message_bytes import Parameter, coded_bytes
from bagua._native import _C
from bagua.bench.collectives import Place
from bagua.bench.options import options_of
from bagua.bench.shapes import Shapes
from bagua.bench.training_step import TrainingStep, algorithm
from ranks import on_ranks
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

_SHAPES = Shapes(
    "a model",
    (
        Parameter("embed", (512, 64), "embedding"),
        Parameter("weight", (512, 256)),
        Parameter("bias", (256,)),
        Parameter("head.weight", (300, 256), "head"),
        Parameter("head.bias", (300,), "head"),
    ),
    0.02,
)


def _place() -> Place:
    assert dist.group.WORLD is not None
    return Place(dist.group.WORLD, torch.device("cpu"), torch.float32, _SHAPES.elements)


@on_ranks(3)
def test_algorithms_are_measured_on_the_shapes_of_a_model() -> None:
    place = _place()
    assert TrainingStep(place, shapes=_SHAPES).check() == ""
    share = TrainingStep.bus_factor(place.ranks)
    for name in bagua.available_algorithms():
        options = options_of(name, {"hierarchical": False, "start_step": 0})
        step = algorithm(name, options, _SHAPES)(place)
        before, begin = step.wire_bytes() or 0, time.perf_counter()
        step.step()
        assert time.perf_counter() - begin > _SHAPES.compute, name
        sent = (step.wire_bytes() or 0) - before
        if name in ("bytegrad", "quantized_allreduce"):
            # By the roles that it sees in the model, as the plan has it.
            coded = coded_bytes(_C.check_options(name, options), _SHAPES.parameters)
            assert sent == pytest.approx(share * coded, rel=0.05), name
        assert step.check() == "", name
        step.close()


def _zeros(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    found: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    found.set_result(bucket.buffer().zero_())
    return found


@on_ranks(3)
def test_ranks_with_other_gradients_are_found() -> None:
    class Nothing:
        algorithm = "bytegrad"

    def register(ddp: Any, optimizer: Any) -> Any:
        ddp.register_comm_hook(None, noop_hook)
        return Nothing()

    def register_zeros(ddp: Any, optimizer: Any) -> Any:
        ddp.register_comm_hook(None, _zeros)
        return Nothing()

    assert "the cosine between them" in TrainingStep(_place(), register_zeros, shapes=_SHAPES).check()
    check = TrainingStep(_place(), register, shapes=_SHAPES).check()
    assert check == "ranks [1, 2] have other gradients than rank 0"
