# SPDX-License-Identifier: Apache-2.0
"""What would do nothing without a word: arguments in wrong places, models in wrappers, hooks that compress nothing."""

import contextlib
import time
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from hooked_models import (
    emulated_hosts,
    gradients_of,
    logged,
    loss_of,
    optimizer_for,
    perceptron,
    same,
    same_everywhere,
    take_steps,
)
from ranks import Pools, on_new_ranks, on_ranks
from reference import for_each, named
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

# --- arguments in wrong places ---


class _LooksLikeAnOptimizer:
    param_groups: tuple[Any, ...] = ()

    def step(self) -> None: ...


@on_ranks(2)
@for_each(bagua.available_algorithms())
def test_options_that_are_not_given_by_name_are_refused(algorithm: str) -> None:
    ddp = DDP(perceptron())
    needed = ", optimizer=optimizer" if bagua.describe(algorithm)["optimizer"] else ""
    with pytest.raises(TypeError, match=rf"'{algorithm}'{needed}, hierarchical=False, average=True\)"):
        bagua.register_comm_hook(ddp, algorithm, {"hierarchical": False, "average": True})  # type: ignore[arg-type]
    has_bool = any(isinstance(option["default"], bool) for option in bagua.describe(algorithm)["options"])
    if has_bool:
        with pytest.raises(
            TypeError, match=rf"got bool False\. .* by name: write .*'{algorithm}'{needed}, \w+=False\)"
        ):
            bagua.register_comm_hook(ddp, algorithm, False)  # type: ignore[arg-type]
    advice = ": pass the optimizer itself: optimizer=optimizer" if needed else r"\. Options are given by name: write"
    for wrong in ("adam", [ddp], (1, 2), (n for n in ()), _LooksLikeAnOptimizer(), torch.optim.SGD):
        with pytest.raises(TypeError, match=rf"optimizer must be .* got {type(wrong).__name__} .*{advice}"):
            bagua.register_comm_hook(ddp, algorithm, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"process_group must be .* got dict .* by name: write"):
        bagua.register_comm_hook(ddp, algorithm, None, {"hierarchical": False})  # type: ignore[arg-type]
    # Nothing was registered.
    handle = bagua.register_comm_hook(ddp, algorithm, optimizer_for(algorithm, ddp))
    handle.remove()


@on_new_ranks(2)  # whether an unwrapped model's group is known depends on which groups there are
def test_what_one_rank_refuses_ends_the_registration_on_all_at_once() -> None:
    is_wrong, model = dist.get_rank() == 1, DDP(perceptron())
    wrong: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "not wrapped": (model.module, "bytegrad", {}),
        "swapped": ("bytegrad", model, {}),
        "unknown name": (model, "bytegrd", {}),
        "no name": (model, None, {}),
        "group": (model, "bytegrad", {"process_group": {"average": False}}),
        "options as the optimizer": (model, "bytegrad", {"optimizer": {"average": False}}),
        "optimizer of another model": (model, "bytegrad", {"optimizer": optimizer_for("bytegrad", perceptron())}),
    }
    for what, given in wrong.items():
        first, second, options = given if is_wrong else (model, "bytegrad", {})
        begin = time.monotonic()
        expected = "" if is_wrong else "rank 1 could not register its algorithm"
        with named(what), pytest.raises((TypeError, ValueError), match=expected):
            bagua.register_comm_hook(first, second, **options)
        assert time.monotonic() - begin < 30, "half of the timeout"


# --- names of parameters ---


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.out = nn.Linear(4, 4)
        self.blocks[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks[1](self.blocks[0](x)))  # type: ignore[no-any-return]


_MISSPELT: list[tuple[dict[str, Any], str]] = [
    ({"exact": ("embeding",)}, r"'embeding'.*\(did you mean 'embedding'\?\)"),
    ({"exact": ("haed",)}, r"'haed'.*\(did you mean 'head'\?\)"),
    ({"exact": ("1D",)}, r"'1D'.*\(did you mean '1d'\?\)"),
    ({"exact": ("1d", "block.*")}, r"'block\.\*', which .* fits no parameter's name"),
    ({"codec": {"block.*": "2bit", "*": "4bit"}}, r"option 'codec' .* holds 'block\.\*'.* fits no parameter's name"),
    ({"codec": {"out.weigth": "2bit", "*": "4bit"}}, r"\(did you mean 'out\.weight'\?\)"),
]


@on_ranks(2)
def test_a_name_that_fits_no_parameter_is_refused_unless_it_is_a_word_or_one_of_a_frozen_one() -> None:
    for options, expected in _MISSPELT:
        with named(options), pytest.raises(ValueError, match=expected):
            bagua.register_comm_hook(DDP(Named()), "quantized_allreduce", **options)
    # Words of which the model has none, and a pattern that only frozen parameters fit.
    exact = ("1d", "embedding", "head", "small", "blocks.0.*")
    bagua.register_comm_hook(DDP(Named()), "quantized_allreduce", exact=exact, codec={"blocks.*": "2bit", "*": "4bit"})


# --- models ---


class Around(nn.Module):
    """As a trainer's library wraps a model: it calls the DDP model in its forward."""

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.inside = nn.ModuleList(inside)

    def forward(self, *args: Any) -> Any:
        return self.inside[0](*args)


@on_ranks(2)
def test_a_ddp_model_is_found_in_a_wrapper() -> None:
    expected = None
    for wrap in (lambda ddp: ddp, Around, lambda ddp: torch.compile(ddp, backend="eager")):
        ddp = DDP(perceptron())
        model = wrap(ddp)
        handle = bagua.register_comm_hook(model, "bytegrad", hierarchical=False)
        for step in range(3):
            loss_of(model, step).backward()
        assert handle.stats()["steps"] == 3
        expected = expected or gradients_of(ddp)
        assert same(gradients_of(ddp), expected)


@on_ranks(2)
def test_an_algorithm_on_weights_sees_the_steps_of_a_compiled_model() -> None:
    ddp = DDP(perceptron())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    model = torch.compile(ddp, backend="eager")
    handle = bagua.register_comm_hook(model, "decentralized", optimizer=optimizer)
    take_steps(model, optimizer, range(3))
    assert handle.stats()["rounds"] == 3
    handle.synchronize()


@on_ranks(2)
def test_one_optimizer_may_train_several_models() -> None:
    models = [DDP(perceptron()) for _ in range(2)]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.01, momentum=0.9)
    handles = [bagua.register_comm_hook(model, "local_sgd", optimizer=optimizer, sync_every=2) for model in models]
    for step in range(4):
        optimizer.zero_grad()
        torch.stack([loss_of(model, step) for model in models]).sum().backward()
        optimizer.step()
    assert [handle.stats()["rounds"] for handle in handles] == [2, 2]
    assert same_everywhere(*(p for model in models for p in model.parameters()))
    first, second = ([optimizer.state[p]["momentum_buffer"] for p in model.parameters()] for model in models)
    own = [momentum.clone() for momentum in second]
    handles[0].remove()
    assert same_everywhere(*first)
    assert same(second, own)
    assert not same_everywhere(*second)


@on_ranks(2)
def test_a_wrapper_of_more_than_a_ddp_model_is_refused() -> None:
    first, second = DDP(perceptron()), DDP(perceptron())
    with pytest.raises(TypeError, match=r"holds inside\.0, inside\.1: pass .* such as model\.inside\.0"):
        bagua.register_comm_hook(Around(first, second), "bytegrad")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"holds inside\.0 and the parameters inside\.1\.weight, .* outside"):
        bagua.register_comm_hook(Around(first, nn.Linear(2, 2)), "bytegrad")  # type: ignore[arg-type]
    for model in (first, second):
        bagua.register_comm_hook(model, "bytegrad")


@on_ranks(2)
@for_each(bagua.available_algorithms())
def test_a_model_whose_parameters_are_all_frozen_is_refused(algorithm: str) -> None:
    ddp = DDP(perceptron())
    optimizer = optimizer_for(algorithm, ddp)
    ddp.requires_grad_(False)
    with pytest.raises(ValueError, match=r"all parameters of the model are frozen.*requires_grad=True"):
        bagua.register_comm_hook(ddp, algorithm, optimizer)


@on_ranks(2)
def test_parameters_that_are_frozen_or_not_since_the_model_was_wrapped_are_refused() -> None:
    for before, after in ((True, False), (False, True)):
        model = perceptron()
        weight = next(model.parameters()).requires_grad_(before)
        ddp = DDP(model)
        weight.requires_grad_(after)
        expected = rf"DDP reduces {5 + before} parameters, and {5 + after} are trainable: set requires_grad before"
        with pytest.raises(ValueError, match=expected):
            bagua.register_comm_hook(ddp, "bytegrad")


class WithOwnAndTied(nn.Module):
    """Has a parameter of its own, and one that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(23))
        self.first, self.second = nn.Linear(23, 23), nn.Linear(23, 23)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x * self.scale))


@on_ranks(2)
@for_each([[".scale"], ["scale"], ["first.weight"], ["second.weight"], ["first.weight", "second.weight"]])
def test_parameters_are_ignored_by_the_names_by_which_ddp_ignores_them(names: list[str]) -> None:
    model = WithOwnAndTied()
    DDP._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]
    ddp = DDP(model)
    bagua.register_comm_hook(ddp, "bytegrad")
    for step in range(2):
        loss_of(ddp, step).backward()


@on_ranks(2)
@for_each([name for name in bagua.available_algorithms() if bagua.describe(name)["optimizer"]])
def test_the_steps_of_another_optimizer_than_the_one_that_was_given_are_noticed(algorithm: str) -> None:
    ddp = DDP(perceptron())
    given = optimizer_for(algorithm, ddp, warmup=1)
    handle = bagua.register_comm_hook(ddp, algorithm, given)
    with logged() as lines:
        take_steps(ddp, given, range(2))
        # So does one that works within the given one, or around it.
        inner = torch.optim.SGD(ddp.parameters(), lr=1e-9)
        loss_of(ddp, 2).backward()
        inner.step()
        given.step()
        inner.step()
        take_steps(ddp, given, range(3, 4))
    assert "does not see" not in lines.getvalue()
    with logged() as lines, contextlib.ExitStack() as stack:
        if algorithm == "qadam":
            stack.enter_context(pytest.raises(RuntimeError, match="does not see the steps of the SGD"))
        take_steps(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), range(4, 8))
    assert lines.getvalue().count("does not see the steps of the SGD") == (algorithm != "qadam")
    handle.remove()


@on_ranks(2)
@for_each(bagua.available_algorithms())
def test_a_checkpoint_of_something_else_is_refused(algorithm: str) -> None:
    ddp = DDP(perceptron())
    handle = bagua.register_comm_hook(ddp, algorithm, optimizer_for(algorithm, ddp))
    for wrong, missing in (
        ({}, "algorithm, options, state, layout"),
        (ddp.module.state_dict(), "algorithm, options, state, layout"),
        ({"state": {}, "algorithm": algorithm}, "options, layout"),
    ):
        with pytest.raises(ValueError, match=f"lacks {missing}: pass what the state_dict"):
            handle.load_state_dict(wrong)
    for value in (None, [], "checkpoint.pt"):
        with pytest.raises(TypeError, match=f"must be a dict, got {type(value).__name__}"):
            handle.load_state_dict(value)  # type: ignore[arg-type]
    whole = handle.state_dict()
    for part, value in (
        ("state", None),
        ("state", {"a": 1}),
        ("layout", None),
        ("layout", "x"),
        ("layout", [["x"]]),
        ("step", "one"),
        ("step", 2**70),
    ):
        with pytest.raises(TypeError, match=f"'{part}' of the checkpoint must be .*, got .*: pass what the state_dict"):
            handle.load_state_dict({**whole, part: value})
    # Some say that it is foreign, and others what they miss.
    for foreign in ("zz", "sender.0", "sender.zz.0", "sender.minmax_uint8.0.pieces"):
        with pytest.raises(ValueError, match="bagua: "):
            handle.load_state_dict({**whole, "state": {foreign: torch.ones(2)}})
    handle.load_state_dict(whole)
    handle.remove()


# --- hooks that compress nothing ---


def _lines_and_stages(algorithm: str, hosts: str, options: dict[str, Any]) -> tuple[list[str], list[str], set[str]]:
    """What registering and the first steps logged of compression, and the stages of the steps."""
    with emulated_hosts(hosts) as group:
        ddp = DDP(perceptron(), process_group=group)
        optimizer = optimizer_for(algorithm, ddp, warmup=1)
        with logged() as registering:
            handle = bagua.register_comm_hook(ddp, algorithm, optimizer, **options)
        with logged() as training:
            take_steps(ddp, optimizer, range(4))
        handle.synchronize()
        stages = set(handle.stats()["seconds"])
        if bagua.describe(algorithm)["runs_in_background"]:
            handle.abort()
    first, later = (
        [line for line in text.getvalue().splitlines() if "compress" in line] for text in (registering, training)
    )
    return first, later, stages


# With a codec, of everything, from the first step on, and with rounds that come within four steps.
_CODED = {"codec": "minmax_uint8", "exact": (), "start_step": 0, "rank": 1, "min_compression": 1.0, "sync_every": 2}


def _options(algorithm: str, hierarchical: bool) -> dict[str, Any]:
    known = {option["name"] for option in bagua.describe(algorithm)["options"]}
    return {name: value for name, value in {**_CODED, "hierarchical": hierarchical}.items() if name in known}


@pytest.mark.parametrize(
    ("hosts", "hierarchical"), [("A", True), ("A", False), ("AA", True), ("AB", True), ("AB", False)]
)
@pytest.mark.parametrize("algorithm", bagua.available_algorithms())
def test_a_hook_says_once_where_it_compresses_nothing(
    rank_pools: Pools, algorithm: str, hosts: str, hierarchical: bool
) -> None:
    options = _options(algorithm, hierarchical)
    results = rank_pools[len(hosts)].run(_lines_and_stages, algorithm, hosts, options)
    lines, _, stages = results[0]
    if "codec" not in options:
        assert lines == [], "it never compresses"
    elif "compress" in stages:
        assert lines == []
    else:
        assert len(lines) == 1
        advice = "torchrun --nproc-per-node" if hosts == "A" else "Pass hierarchical=False"
        assert f"'{algorithm}' compresses nothing" in lines[0]
        assert advice in lines[0]
    assert all(own == [] for own, _, _ in results[1:]), "rank 0 says it for all"
    assert all(later == [] for _, later, _ in results)


def _two_argument_form(hosts: str) -> list[str]:
    with emulated_hosts(hosts) as group, logged() as text:
        ddp = DDP(perceptron(), process_group=group)
        ddp.register_comm_hook(*bagua.comm_hook("bytegrad", process_group=group))
        for step in range(2):
            loss_of(ddp, step).backward()
    return text.getvalue().splitlines()


def test_the_two_argument_form_says_it_too(rank_pools: Pools) -> None:
    first, other = rank_pools[2].run(_two_argument_form, "AA")
    assert len(first) == 1
    assert "Pass hierarchical=False" in first[0]
    assert other == []
    assert rank_pools[2].run(_two_argument_form, "AB") == [[], []]
