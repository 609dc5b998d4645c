# SPDX-License-Identifier: Apache-2.0
"""Every algorithm, codec and kind of residuals under DDP, on gradients that are given: beside a plain reference, and on
CUDA beside the same steps on CPU tensors.

Sums of two ranks commute and halves are exact, so that what is our own arithmetic has to have the CPU's bits. What ATen
computes may fuse a multiplication with an addition: a few such numbers then fall to a neighbouring code.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import bagua
import torch
import torch.distributed as dist
from check import Differences, assert_same_on_all_ranks, check, told_by_all
from checks_transport import COARSENESS
from devices import STOCK_BACKEND, settle
from hooked_models import new_group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 6
LR = 0.5  # a power of two: it does not matter whether a device fuses products with additions
BETA = 0.9  # of qadam
WARM_UP = 2
# Matrices and vectors, of lengths that are no multiple of anything; some are too small to be coded by default.
SHAPES = ((97, 103), (1003,), (64, 48), (40, 1000), (7,), (801, 33))
UNUSED = 2  # takes no part in every second step, where DDP looks for such
FEW = 0.005  # of all elements, that may have fallen to a neighbouring code
Steps = list[list[Tensor | None]]


@dataclass(frozen=True)
class Case:
    """`reference`: "means" of gradients, off by `most` of their norm; those of first "moments"; weights that "drift" as
    their mean does, or are that mean after "rounds"; or "" where equal ranks have to do.
    """

    algorithm: str
    options: dict[str, Any] = field(default_factory=dict)
    most: float = 1e-6
    reference: str = "means"
    beside: float = 0.0  # from the CPU's values, of the largest; 0.0: the same bits
    dtype: torch.dtype = torch.float32
    ddp: dict[str, Any] = field(default_factory=dict)


class _Leaves(nn.Module):
    """Its gradients are the tensors that forward() is given, whatever its weights are."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.leaves = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in SHAPES)

    def forward(self, gradients: Sequence[Tensor | None]) -> Any:
        return sum((p * given).sum() for p, given in zip(self.leaves, gradients, strict=True) if given is not None)


def _given(case: Case, rank: int, step: int) -> list[Tensor | None]:
    """On the CPU: neither centred on zero nor of the same size on two ranks or in two steps."""
    made = torch.Generator().manual_seed(7919 * step + 31 * rank)
    drawn = [torch.randn(shape, generator=made, device="cpu") for shape in SHAPES]
    given: list[Tensor | None] = [((one + 0.3 * rank) * 2.0 ** (step % 3 - 1)).to(case.dtype) for one in drawn]
    if "find_unused_parameters" in case.ddp and step % 2:
        given[UNUSED] = None
    return given


def _train(case: Case, device: torch.device, group: Any) -> tuple[Steps, Steps]:
    """Gradients and weights after each step, and last the weights at the end."""
    gradients: Steps = []
    weights: Steps = []
    with device:
        ddp = DDP(_Leaves(case.dtype), process_group=group, bucket_cap_mb=0.1, **case.ddp)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
        if case.algorithm == "qadam":
            optimizer = bagua.QAdamOptimizer(ddp.parameters(), lr=1e-3, warmup_steps=WARM_UP, betas=(BETA, 0.999))
        handle = bagua.register_comm_hook(ddp, case.algorithm, optimizer=optimizer, **case.options)
        for step in range(STEPS):
            optimizer.zero_grad()
            given = [one if one is None else one.to(device) for one in _given(case, dist.get_rank(), step)]
            ddp(given).backward()
            gradients.append([None if p.grad is None else p.grad.clone().cpu() for p in ddp.parameters()])
            optimizer.step()
            weights.append([p.detach().cpu().clone() for p in ddp.parameters()])
        if case.algorithm in ("local_sgd", "diloco"):
            handle.synchronize()
        weights.append([p.detach().cpu().clone() for p in ddp.parameters()])
        handle.remove()
    return gradients, weights


def _mean(case: Case, step: int, index: int) -> Tensor | None:
    """Of the gradients of all ranks, or their sum."""
    size = dist.get_world_size()
    all_of = [_given(case, rank, step)[index] for rank in range(size)]
    values = [one.double() for one in all_of if one is not None]
    return torch.stack(values).sum(0) / (size if case.options.get("average", True) else 1) if values else None


def _compare_with_means(case: Case, found: Differences, gradients: Steps) -> None:
    """With error feedback all steps together have to be as near as one: what one lost comes with the next."""
    has_feedback = case.algorithm in ("quantized_allreduce", "powersgd") and case.options.get("error_feedback", True)
    bound = case.most + 4 * torch.finfo(case.dtype).eps
    for index, shape in enumerate(SHAPES):
        moment, owed, largest = torch.zeros(shape).double(), torch.zeros(shape).double(), torch.zeros(shape).double()
        # What is exact by default, or no matrix that is worth its factors.
        is_exact = len(shape) == 1 and (
            case.algorithm == "powersgd"
            or (case.algorithm == "quantized_allreduce" and shape[0] < 1024 and "exact" not in case.options)
        )
        for step in range(STEPS):
            expected, gradient = _mean(case, step, index), gradients[step][index]
            if expected is None or gradient is None:
                found.true(f"step {step} of {shape}: a gradient without need", expected is None and gradient is None)
                continue
            if case.reference == "moments":
                if step != WARM_UP - 1:  # in which the optimizer lets its moments rest
                    moment = BETA * moment + (1 - BETA) * expected
                expected = moment if step >= WARM_UP else expected
            largest = max(largest, expected, key=torch.norm)
            owed += expected - gradient.double()
            limit = 1e-6 if is_exact or (case.reference == "moments" and step < WARM_UP) else bound
            found.near(f"step {step} of {shape}", gradient, expected, 4 * limit if has_feedback else limit)
        if has_feedback and not is_exact:
            found.near(f"all steps of {shape}", largest + owed, largest, 1.5 * bound)


def _compare_with_drift(case: Case, found: Differences, weights: Steps) -> None:
    """However weights are averaged: as a whole they move by the mean gradients."""
    outer_lr, momentum = (0.7, 0.5) if case.algorithm == "diloco" else (1.0, 0.0)
    for index, shape in enumerate(SHAPES):
        outer, velocity = torch.zeros(shape).double(), torch.zeros(shape).double()
        alone = torch.zeros(shape).double()
        for begin in range(0, STEPS, case.options.get("sync_every", 1)):
            steps = range(begin, begin + case.options.get("sync_every", 1))
            change = torch.zeros(shape).double()
            for step in steps:
                mean, own = _mean(case, step, index), _given(case, dist.get_rank(), step)[index]
                assert mean is not None
                assert own is not None
                change += LR * mean
                alone -= LR * (own.double() - mean)
            velocity = momentum * velocity + change
            outer -= outer_lr * (change + momentum * velocity)
        own_weights = weights[-1][index]
        assert own_weights is not None
        total = own_weights.double().clone()
        with torch.device("cpu"):
            dist.all_reduce(total)
        mean = total / dist.get_world_size()
        found.near(f"mean weights of {shape}", mean, outer, case.most)
        # Without any exchange ranks would be as far from their mean as `alone` is from nothing.
        apart = 0.8 if case.reference == "drift" else 1e-5
        found.near(f"weights of {shape} beside their mean", own_weights, mean, apart, beside=alone)


def _compare_with_the_cpu(case: Case, found: Differences, on_device: Steps, on_cpu: Steps) -> str:
    largest, outside, elements = 0.0, 0, 0
    for step, (ours, theirs) in enumerate(zip(on_device, on_cpu, strict=True)):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            found.true(f"only one side has {index} of {step}", (one is None) == (other is None))
            if one is None or other is None:
                continue
            if case.beside == 0.0:
                found.same(f"result {index} of {step} beside the CPU", one, other)
                continue
            difference = (one.double() - other.double()).abs() / other.double().abs().max().clamp(min=1e-30)
            largest = max(largest, float(difference.max()))
            outside += int((~(difference <= case.beside)).sum())
            elements += one.numel()
    found.true(f"{outside} of {elements} not those of the CPU, by up to {largest:.2g}", outside <= FEW * elements)
    return f"{outside} of {elements} differ by more than {case.beside:g}, at most {largest:.2g}" if outside else ""


def follows_its_reference(case: Case, *, stock: bool = False) -> str:
    found, device, begin = Differences(), torch.get_default_device(), time.monotonic()
    if stock:
        with new_group(backend=STOCK_BACKEND) as group:
            gradients, weights = _train(case, device, group)
            settle()
            told_by_all("done")
    else:
        gradients, weights = _train(case, device, None)
    seconds = time.monotonic() - begin
    with torch.device("cpu"):
        if case.reference in ("means", "moments"):
            _compare_with_means(case, found, gradients)
            assert_same_on_all_ranks(one for step in gradients for one in step if one is not None)
        elif case.reference:
            _compare_with_drift(case, found, weights)
        if case.reference in ("", "rounds"):
            assert_same_on_all_ranks(one for one in weights[-1] if one is not None)
        on_cpu = _train(case, torch.device("cpu"), None)
        words = _compare_with_the_cpu(case, found, gradients + weights, on_cpu[0] + on_cpu[1])
    return found.verdict(f"{seconds:.2f} s {words}")


FLAT: dict[str, Any] = {"hierarchical": False}
ALL: dict[str, Any] = {**FLAT, "exact": ()}
CLOSE = 1e-5
LOW_RANK: dict[str, Any] = {"start_step": 2, "rank": 2}
# The smallest tensor shares its groups with larger ones.
MOST = {codec: 1.5 * most for codec, most in COARSENESS.items()}


def _quantized(codec: str, **more: Any) -> Case:
    return Case("quantized_allreduce", {**ALL, "codec": codec, "error_feedback": True, **more}, MOST[codec])


CASES = {
    "gradient_allreduce": Case("gradient_allreduce"),
    "gradient_allreduce.sum": Case("gradient_allreduce", {"average": False}),
    "gradient_allreduce.bfloat16": Case("gradient_allreduce", dtype=torch.bfloat16),
    **{f"bytegrad.{codec}": Case("bytegrad", {**FLAT, "codec": codec}, MOST[codec]) for codec in MOST},
    "bytegrad.bfloat16": Case("bytegrad", FLAT, 0.03, dtype=torch.bfloat16),
    "bytegrad.float16": Case("bytegrad", FLAT, 0.03, dtype=torch.float16),
    "bytegrad.bucket_views": Case("bytegrad", FLAT, 0.03, ddp={"gradient_as_bucket_view": True}),
    **{f"quantized.{codec}": _quantized(codec) for codec in MOST},
    **{f"quantized.{codec}.8bit": replace(_quantized(codec, residuals="8bit"), beside=CLOSE) for codec in MOST},
    "quantized.default": Case("quantized_allreduce", FLAT, MOST["4bit"]),
    "quantized.bfloat16": replace(_quantized("4bit"), dtype=torch.bfloat16),
    "quantized.no_feedback": _quantized("4bit", error_feedback=False),
    "quantized.stochastic": _quantized("4bit", rounding="stochastic"),
    "quantized.unused": replace(_quantized("4bit"), ddp={"find_unused_parameters": True}),
    "quantized.static": replace(_quantized("4bit"), ddp={"static_graph": True}),
    "decentralized": Case("decentralized", FLAT, reference="drift"),
    "decentralized.shift_one": Case("decentralized", {**FLAT, "peer_selection_mode": "shift_one"}, reference="drift"),
    "low_precision": Case("low_precision_decentralized", FLAT, 0.03, "drift", CLOSE),
    "qadam": Case("qadam", FLAT, 0.03, "moments", CLOSE),
    "powersgd": Case("powersgd", LOW_RANK, 1.0, beside=CLOSE),
    "powersgd.cold": Case("powersgd", {**LOW_RANK, "warm_start": False}, 1.0, beside=CLOSE),
    "powersgd.int8": Case("powersgd", {**LOW_RANK, "codec": "int8"}, 1.0, beside=1e-2),
    "local_sgd": Case("local_sgd", {"sync_every": 2}, 1e-5, "rounds", CLOSE),
    "diloco": Case("diloco", {"sync_every": 2, "fragments": 1, "delay": 0}, 1e-5, "rounds", CLOSE),
    "diloco.4bit": Case("diloco", {"sync_every": 4, "fragments": 2, "delay": 1, "codec": "4bit"}, 0.0, "", CLOSE),
}
# Of four ranks on two hosts; their own codes are of lanes, so that other lengths are coded together.
ON_HOSTS: dict[str, Any] = {"hierarchical": True}
HIERARCHICAL = {
    "bytegrad": Case("bytegrad", ON_HOSTS, 0.03, beside=CLOSE),
    "quantized": Case("quantized_allreduce", {**ON_HOSTS, "exact": ()}, MOST["4bit"], beside=CLOSE),
    "decentralized": Case("decentralized", ON_HOSTS, 1e-5, "drift", CLOSE),
    "low_precision": Case("low_precision_decentralized", ON_HOSTS, 0.03, "drift", CLOSE),
    "qadam": Case("qadam", ON_HOSTS, 0.03, "moments", CLOSE),
    "local_sgd": Case("local_sgd", {"sync_every": 2, **ON_HOSTS}, 1e-5, "rounds", CLOSE),
    "diloco": Case("diloco", {"sync_every": 2, "fragments": 1, "delay": 0, **ON_HOSTS}, 1e-5, "rounds", CLOSE),
}
ON_STOCK = ("gradient_allreduce", "bytegrad.int8", "quantized.4bit", "decentralized", "local_sgd")


# Three summands have another order on CUDA, and thirds round.
@check({name: (case,) for name, case in CASES.items()}, sizes=(2,), seconds=20)
def hook(case: Case) -> str:
    return follows_its_reference(case)


@check({name: (CASES[name],) for name in ON_STOCK}, sizes=(2,), seconds=20)
def hook_on_a_stock_group(case: Case) -> str:
    return follows_its_reference(case, stock=True)


@check({name: (case,) for name, case in HIERARCHICAL.items()}, sizes=(4,), seconds=25, hosts="AABB")
def hierarchical_hook(case: Case) -> str:
    return follows_its_reference(case)


@check({name: (replace(CASES[name], beside=CLOSE),) for name in ON_STOCK}, sizes=(4,), seconds=25)
def hook_of_four(case: Case) -> str:
    return follows_its_reference(case)


@check(sizes=(2, 4), seconds=20)
def rounds_of_async_move_weights_and_do_not_change_their_sum() -> str:
    ddp = DDP(nn.Linear(11, 1, bias=False))
    nn.init.zeros_(ddp.module.weight)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    handle = bagua.register_comm_hook(ddp, "async", optimizer=optimizer, sync_interval_ms=1)
    for _ in range(30):
        optimizer.zero_grad()
        ddp(torch.full((1, 11), dist.get_rank() + 1.0)).sum().backward()
        optimizer.step()
        time.sleep(0.005)
    handle.abort()
    mean = torch.full((1, 11), -15.0 * (dist.get_world_size() + 1))
    torch.testing.assert_close(ddp.module.weight.detach(), mean, rtol=1e-3, atol=0)
    assert_same_on_all_ranks(ddp.parameters())
    rounds = handle.stats()["rounds"]
    assert rounds > 0
    return f"{rounds} rounds in 30 steps"


@check(sizes=(2,), seconds=20)
def steps_after_a_checkpoint_have_the_bits_of_an_unbroken_run() -> str:
    """Its copies are taken at once, and used at once."""
    case, found, rank = _quantized("4bit"), Differences(), dist.get_rank()

    def fresh() -> tuple[DDP, Any]:
        ddp = DDP(_Leaves(case.dtype), bucket_cap_mb=0.1)
        return ddp, bagua.register_comm_hook(ddp, case.algorithm, **case.options)

    def step(ddp: DDP, number: int) -> list[Tensor]:
        ddp.zero_grad()
        device = torch.get_default_device()
        ddp([one if one is None else one.to(device) for one in _given(case, rank, number)]).backward()
        return [p.grad.clone() for p in ddp.parameters() if p.grad is not None]

    ddp, handle = fresh()
    for number in range(3):
        step(ddp, number)
    state = handle.state_dict()
    expected = [step(ddp, number) for number in range(3, 6)]
    ddp, handle = fresh()
    for number in range(2):  # DDP makes its buckets anew after its first step
        step(ddp, number)
    handle.load_state_dict(state)
    for number, gradients in zip(range(3, 6), expected, strict=True):
        for index, (one, other) in enumerate(zip(step(ddp, number), gradients, strict=True)):
            found.same(f"step {number} of {SHAPES[index]}", one, other)
    return found.verdict()
