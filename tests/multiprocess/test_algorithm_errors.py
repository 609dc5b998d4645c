# SPDX-License-Identifier: Apache-2.0
"""Wrong use of the algorithms that own weights or momentum: an error on every rank, before the first step."""

import itertools
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from hooked_models import Leaves, loss_of, optimizer_for, perceptron, take_steps
from ranks import on_ranks
from reference import for_each, named
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

OWNERS = ["decentralized", "low_precision_decentralized", "qadam", "async", "local_sgd", "diloco"]
SECONDS = 20.0  # for a test that takes one: a rank that waits for another which raised is a failure


def _defaults(algorithm: str) -> dict[str, Any]:
    return {option["name"]: option["default"] for option in bagua.describe(algorithm)["options"]}


def hook(ddp: DDP, algorithm: str, **options: Any) -> bagua.Handle:
    optimizer = optimizer_for(algorithm, ddp)
    return bagua.register_comm_hook(ddp, algorithm, optimizer=optimizer, **options)


def _still_trains(ddp: DDP, algorithm: str, **options: Any) -> None:
    """Nothing is left of registrations that failed, on this rank or between the ranks."""
    optimizer = optimizer_for(algorithm, ddp)
    handle = bagua.register_comm_hook(ddp, algorithm, optimizer=optimizer, **options)
    take_steps(ddp, optimizer, range(4))
    assert handle.stats()["steps"] == 4
    if algorithm == "async":
        handle.abort()


@on_ranks(2, timeout=SECONDS)
def test_options_have_the_registered_defaults() -> None:
    for algorithm in bagua.available_algorithms():
        handle = hook(DDP(perceptron()), algorithm)
        assert handle.algorithm == algorithm
        assert handle.options == _defaults(algorithm), algorithm
        assert algorithm in repr(handle)
        if algorithm == "async":
            handle.abort()


# --- names and values ---


Wrong = list[tuple[str, dict[str, Any], list[str]]]
UNKNOWN: Wrong = [(owner, {"interval": 3}, ["'interval'", *_defaults(owner)]) for owner in OWNERS]
WRONG_VALUES: Wrong = [
    ("decentralized", {"peer_selection_mode": "ring"}, ["ring", "all", "shift_one"]),
    ("decentralized", {"communication_interval": 0}, ["communication_interval"]),
    ("low_precision_decentralized", {"communication_interval": 0}, ["communication_interval"]),
    ("async", {"peer_selection_mode": "shift_one"}, ["shift_one", "all"]),
    ("async", {"sync_interval_ms": 0}, ["sync_interval_ms"]),
    ("async", {"warmup_steps": -1}, ["warmup_steps"]),
    ("local_sgd", {"sync_every": 0}, ["sync_every"]),
    ("diloco", {"sync_every": 10, "fragments": 4}, ["sync_every=10", "fragments=4"]),
    ("diloco", {"sync_every": 10, "fragments": 2, "delay": 5}, ["delay", "sync_every / fragments = 5"]),
    ("diloco", {"sync_every": 7, "fragments": 7}, ["6 trainable parameters", "fragments=7"]),
    ("diloco", {"mixing": 1.5}, ["mixing"]),
    ("diloco", {"outer_lr": -0.1}, ["outer_lr"]),
    ("diloco", {"fragment_pattern": "random"}, ["consecutive", "strided"]),
    ("diloco", {"codec": "3bit"}, ["3bit", "minmax_uint8"]),
    ("quantized_allreduce", {"guard": "adopt"}, ["guard must be None, 'warn' or 'adapt', got 'adopt'"]),
    ("diloco", {"guard": "adapt"}, ["guard='adapt' is for algorithms that code gradients", "Take guard='warn', and a"]),
    ("low_precision_decentralized", {"guard": "adopt"}, ["guard must be None or 'warn', got 'adopt'"]),
    ("diloco", {"delay": "late"}, ["'delay' takes a number or 'auto', got 'late'"]),
    ("quantized_allreduce", {"rounding": "up"}, ["'nearest' or 'stochastic', got 'up'"]),
    ("quantized_allreduce", {"residuals": "int4"}, ["'float32' or '8bit', got 'int4'"]),
    ("quantized_allreduce", {"error_feedback": "on"}, ["'auto', True or False, got 'on'"]),
    ("quantized_allreduce", {"start_step": -1}, ["start_step must be at least 0, got -1"]),
]


WRONG_TYPES: Wrong = [
    ("decentralized", {"communication_interval": 1.5}, ["communication_interval"]),
    ("decentralized", {"peer_selection_mode": 1}, ["peer_selection_mode"]),
    ("decentralized", {"hierarchical": 1}, ["hierarchical"]),
    ("decentralized", {"communication_interval": None}, ["'communication_interval' of", " takes an int, got None"]),
    ("diloco", {"codec": 4}, ["codec"]),
    ("diloco", {"delay": None}, ["'delay' of algorithm 'diloco' takes a str or int, got None"]),
    ("diloco", {"sync_every": 1.5}, ["'sync_every' of algorithm 'diloco' takes a str or int, got 1.5"]),
]


@pytest.mark.parametrize(
    ("cases", "error"),
    [(UNKNOWN, ValueError), (WRONG_VALUES, ValueError), (WRONG_TYPES, TypeError)],
    ids=["unknown names", "values", "types"],
)
@on_ranks(2, timeout=2 * SECONDS)
def test_wrong_options_are_refused_by_name(cases: Wrong, error: type[Exception]) -> None:
    models = {algorithm: DDP(perceptron()) for algorithm in dict.fromkeys(case[0] for case in cases)}
    for algorithm, options, words in cases:
        with named(algorithm, options):
            with pytest.raises(error) as refused:
                hook(models[algorithm], algorithm, **options)
            assert [word for word in words if word not in str(refused.value)] == []
    for algorithm, ddp in models.items():
        _still_trains(ddp, algorithm)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup_steps": 0}, "warmup"),
        ({"warmup_steps": -3}, "warmup"),
        ({"lr": -1e-3}, "learning rate"),
        ({"eps": -1e-8}, "eps"),
        ({"betas": (1.0, 0.999)}, "(?i)beta"),
        ({"betas": (0.9, 1.0)}, "(?i)beta"),
        ({"betas": (-0.1, 0.999)}, "(?i)beta"),
        ({"weight_decay": -0.1}, "weight"),
    ],
    ids=str,
)
def test_wrong_options_of_the_qadam_optimizer_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        bagua.QAdamOptimizer(perceptron().parameters(), **options)


# --- the optimizer ---


@on_ranks(2, timeout=SECONDS)
@for_each(OWNERS)
def test_an_optimizer_that_fits_is_asked_for(algorithm: str) -> None:
    ddp = DDP(perceptron())
    zero = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})(ddp.parameters(), lr=0.1)
    unfit = "needs an optimizer of class bagua" if algorithm == "qadam" else "cannot work with"
    for given, problem in (
        (None, "acts on .* optimizer="),
        (torch.optim.LBFGS(ddp.parameters()), unfit),
        (zero, unfit),
    ):
        with pytest.raises(ValueError, match=f"'{algorithm}' {problem}"):
            bagua.register_comm_hook(ddp, algorithm, given)
    _still_trains(ddp, algorithm)


@on_ranks(2, timeout=SECONDS)
@for_each(bagua.available_algorithms())
def test_an_optimizer_of_other_parameters_is_refused(algorithm: str) -> None:
    ddp = DDP(perceptron())
    too_few, of_another = nn.ParameterList([*ddp.parameters()][:-1]), perceptron()
    refused = f"given to algorithm '{algorithm}' does not hold .* pass the one that trains"
    for wrong, is_on_one_rank in itertools.product((too_few, of_another), (False, True)):
        is_odd = not is_on_one_rank or dist.get_rank() == 1
        with pytest.raises(ValueError, match=refused if is_odd else "rank 1"):
            bagua.register_comm_hook(ddp, algorithm, optimizer_for(algorithm, wrong if is_odd else ddp))
    _still_trains(ddp, algorithm)


@on_ranks(2, timeout=SECONDS)
@for_each(["bytegrad", "quantized_allreduce", "powersgd", "local_sgd"])
def test_complex_parameters_are_for_sums_alone(algorithm: str) -> None:
    ddp = DDP(Leaves((3, 2), dtype=torch.complex64))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"complex parameters \(leaves\.0\)"):
        bagua.register_comm_hook(ddp, algorithm, optimizer)
    bagua.register_comm_hook(ddp, "gradient_allreduce")
    if algorithm != "local_sgd":
        unnamed = DDP(Leaves((3, 2), dtype=torch.complex64))
        unnamed.register_comm_hook(*bagua.comm_hook(algorithm))
        with pytest.raises(ValueError, match=r"complex parameters \(of shape \[3, 2\]\)"):
            unnamed([torch.ones(3, 2, dtype=torch.complex64)]).real.backward()


@on_ranks(2, timeout=SECONDS)
def test_qadam_refuses_scaled_gradients() -> None:
    ddp = DDP(perceptron())
    optimizer = optimizer_for("qadam", ddp)
    bagua.register_comm_hook(ddp, "qadam", optimizer=optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(ddp, 0)).backward()
    before = [p.detach().clone() for p in ddp.parameters()]
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.step(optimizer)
    assert all(map(torch.equal, before, ddp.parameters()))


# --- ranks that disagree ---

DISAGREEMENTS: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("decentralized", {}, "low_precision_decentralized", {}),
    ("qadam", {}, "gradient_allreduce", {}),
    ("diloco", {}, "local_sgd", {}),
    ("decentralized", {}, "decentralized", {"communication_interval": 2}),
    ("decentralized", {}, "decentralized", {"peer_selection_mode": "shift_one"}),
    ("low_precision_decentralized", {}, "low_precision_decentralized", {"hierarchical": False}),
    ("async", {}, "async", {"warmup_steps": 3}),
]


@on_ranks(3, timeout=2 * SECONDS)
def test_ranks_that_disagree_raise_everywhere() -> None:
    last = dist.get_world_size() - 1
    for algorithm, options, other, other_options in DISAGREEMENTS:
        ddp = DDP(perceptron())
        name, chosen = (other, other_options) if dist.get_rank() == last else (algorithm, options)
        with named(algorithm, options, other, other_options):
            with pytest.raises(ValueError, match=f"rank {last} (has|registered)") as error:
                hook(ddp, name, **chosen)
            for words in (algorithm, other, *other_options):
                assert words in str(error.value)
            _still_trains(ddp, algorithm, **options)


@on_ranks(2, timeout=SECONDS)
def test_qadam_optimizers_that_disagree_about_the_warm_up_raise() -> None:
    ddp = DDP(perceptron())
    optimizer = bagua.QAdamOptimizer(ddp.parameters(), warmup_steps=3 + dist.get_rank())
    with pytest.raises(ValueError, match=r"rank 1 (has|registered).*warmup_steps"):
        bagua.register_comm_hook(ddp, "qadam", optimizer=optimizer)
    _still_trains(ddp, "qadam")


# --- one hook, one model, one process ---


@on_ranks(2, timeout=SECONDS)
@for_each(OWNERS)
def test_join_raises(algorithm: str) -> None:
    ddp = DDP(Leaves(3))
    handle = hook(ddp, algorithm)
    with pytest.raises(RuntimeError, match=rf"(?s)join.*{algorithm}|{algorithm}.*join"), ddp.join():
        ddp([torch.ones(3)]).backward()
    if algorithm == "async":
        handle.abort()


@on_ranks(2, timeout=SECONDS)
def test_async_refuses_to_look_for_unused_parameters() -> None:
    ddp = DDP(perceptron(), find_unused_parameters=True)
    with pytest.raises(ValueError, match="find_unused_parameters"):
        hook(ddp, "async")
    loss_of(ddp, 0).backward()
