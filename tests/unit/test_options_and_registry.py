# SPDX-License-Identifier: Apache-2.0
"""Names, options and types: what is refused before anything is sent."""

import copy
import pickle
import runpy
from pathlib import Path
from typing import Any

import bagua
import pytest
import torch
from torch import nn


def test_available_algorithms_begin_with_those_of_the_original_in_its_order() -> None:
    assert bagua.available_algorithms()[:6] == [
        "gradient_allreduce",
        "bytegrad",
        "decentralized",
        "low_precision_decentralized",
        "qadam",
        "async",
    ]
    ours = {"quantized_allreduce", "powersgd", "local_sgd", "diloco"}
    assert ours <= set(bagua.available_algorithms()[6:])
    bagua.available_algorithms().clear()  # of a copy
    assert bagua.available_algorithms()


def test_available_codecs_are_those_that_the_library_holds() -> None:
    assert bagua.available_codecs()[:5] == ["int8", "4bit", "2bit", "1bit", "minmax_uint8"]
    assert len(set(bagua.available_codecs())) == len(bagua.available_codecs())
    bagua.available_codecs().clear()
    assert bagua.available_codecs()


@pytest.mark.parametrize("algorithm", bagua.available_algorithms())
def test_options_are_described_with_types_that_their_defaults_have(algorithm: str) -> None:
    for option in bagua.describe(algorithm)["options"]:
        kind = "None" if option["default"] is None else type(option["default"]).__name__
        assert kind in option["type"].split(" | "), option


def test_options_that_take_several_types_say_so() -> None:
    kinds = {o["name"]: o["type"] for o in bagua.describe("quantized_allreduce")["options"]}
    assert kinds["codec"] == "str | Mapping[str, str]"
    assert kinds["exact"] == "str | Sequence[str]"
    assert kinds["error_feedback"] == "bool | str"
    assert kinds["guard"] == "str | None"


def test_an_editor_finds_the_options_that_there_are() -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "typed_options.py"))
    assert script["STUB"].read_text() == script["stub"](), "run scripts/typed_options.py"


@pytest.mark.parametrize("algorithm", bagua.available_algorithms())
def test_a_misspelt_algorithm_is_recognised(algorithm: str) -> None:
    for misspelt in (algorithm[:-1], algorithm.upper(), algorithm[:2] + algorithm[3] + algorithm[2] + algorithm[4:]):
        with pytest.raises(ValueError, match=rf"no algorithm is named '{misspelt}' \(did you mean '.*{algorithm}'"):
            bagua.comm_hook(misspelt)


def test_options_in_the_place_of_the_group_are_refused() -> None:
    for wrong in ({"hierarchical": False}, False):
        advice = r"by name: write comm_hook\('bytegrad', hierarchical=False\)"
        with pytest.raises(TypeError, match=rf"process_group must be .* got {type(wrong).__name__} .* {advice}"):
            bagua.comm_hook("bytegrad", wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("misspelt", "meant"), [("optimiser", "optimizer"), ("processgroup", "process_group")])
def test_misspelt_arguments_are_not_taken_for_options(misspelt: str, meant: str) -> None:
    model: Any = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=rf"no option '{misspelt}' \(did you mean '{meant}'\?\)"):
        bagua.register_comm_hook(model, "bytegrad", **{misspelt: torch.optim.SGD(model.parameters())})


@pytest.mark.parametrize("value", [1, 0, 0.5, "False", None, [True], torch.tensor(True)], ids=repr)
def test_an_option_of_a_wrong_type_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"hierarchical|incompatible"):
        bagua.comm_hook("bytegrad", hierarchical=value)


_NAMES = "one of gradient_allreduce, bytegrad, .*"


@pytest.mark.parametrize("name", [None, 3, torch.optim.SGD, nn.Linear(2, 2)], ids=lambda name: type(name).__name__)
def test_a_name_that_is_no_text_is_refused(name: Any) -> None:
    with pytest.raises(TypeError, match=rf"algorithm must be a name, {_NAMES}, got {type(name).__name__} .* no model"):
        bagua.comm_hook(name)


@pytest.mark.parametrize("given", [("bytegrad", nn.Linear(2, 2)), (nn.Linear(2, 2), None)], ids=["swapped", "None"])
def test_the_model_comes_first(given: tuple[Any, Any]) -> None:
    with pytest.raises(TypeError, match=rf"algorithm must be a name, {_NAMES}; the model comes first: write register"):
        bagua.register_comm_hook(*given)


def test_an_optimizer_leads_from_comm_hook_to_register_comm_hook() -> None:
    optimizer: Any = torch.optim.SGD(nn.Linear(2, 2).parameters())
    advice = r"use bagua\.register_comm_hook\(model, 'decentralized', optimizer=optimizer\)"
    # In the place of the group, and by name.
    for place, named in (([optimizer], {}), ([], {"optimizer": optimizer})):
        with pytest.raises(ValueError, match=advice):
            bagua.comm_hook("decentralized", *place, **named)
        with pytest.raises(TypeError, match="algorithm 'bytegrad' needs none: leave it out"):
            bagua.comm_hook("bytegrad", *place, **named)


@pytest.mark.parametrize("value", [2**70, -(2**70), 10**5000], ids=["large", "negative", "huge"])
def test_a_number_that_is_too_large_is_refused_by_name_and_range(value: int) -> None:
    model: Any = nn.Linear(2, 2)
    expected = "'sync_every' of algorithm 'local_sgd' takes whole numbers from -9.* to 9.* bits"
    with pytest.raises(ValueError, match=expected):
        bagua.register_comm_hook(model, "local_sgd", sync_every=value)


@pytest.mark.parametrize(
    "value", [float("inf"), float("-inf"), float("nan"), 10**5000], ids=["inf", "-inf", "nan", "huge"]
)
def test_every_float_is_finite(value: float) -> None:
    model: Any = nn.Linear(2, 2)
    options = [(name, option) for name in bagua.available_algorithms() for option in bagua.describe(name)["options"]]
    floats = [(algorithm, option["name"]) for algorithm, option in options if isinstance(option["default"], float)]
    assert len(floats) >= 3
    for algorithm, name in floats:
        with pytest.raises(ValueError, match=f"'{name}' of algorithm '{algorithm}' takes a finite number"):
            bagua.register_comm_hook(model, algorithm, **{name: value})


@pytest.mark.parametrize("mapping", [{"1d": "4bit"}, {}], ids=str)
def test_a_mapping_is_only_taken_where_it_means_something(mapping: dict[str, str]) -> None:
    for algorithm, option in (("quantized_allreduce", "exact"), ("bytegrad", "codec")):
        with pytest.raises(TypeError, match=rf"'{option}' of algorithm '{algorithm}' takes no mapping, got {{"):
            bagua.comm_hook(algorithm, **{option: mapping})


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"exact": ("1d", "head")}, "'exact' .* holds 'head'"),
        ({"exact": ("embeding",)}, "'exact' .* holds 'embeding', a pattern"),
        ({"codec": {"blocks.*": "2bit", "*": "4bit"}}, r"'codec' .* holds 'blocks\.\*', a pattern"),
        ({"codec": {"head": "int8", "*": "4bit"}}, "'codec' .* holds 'head'"),
    ],
    ids=["role", "misspelt", "codec", "role of a codec"],
)
def test_what_needs_a_model_is_refused_where_there_is_none(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=rf"{what}.* only a model can tell: bagua\.comm_hook is given none"):
        bagua.comm_hook("quantized_allreduce", **options)
    bagua.comm_hook("quantized_allreduce", exact=("1d", "small"), codec={"*": "2bit"})
    bagua.comm_hook("quantized_allreduce", codec="2bit")  # which has roles by default


def test_a_hook_that_has_done_nothing_has_no_figures() -> None:
    state, hook = bagua.comm_hook("bytegrad", hierarchical=False, average=False)
    assert state.stats() == {}
    assert callable(hook)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), None, "model"], ids=lambda model: type(model).__name__)
def test_a_model_that_is_not_wrapped_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match=f"DistributedDataParallel, got {type(model).__name__}"):
        bagua.register_comm_hook(model, "bytegrad")


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_the_state_of_a_hook_cannot_be_copied(duplicate: Any) -> None:
    state, _ = bagua.comm_hook("bytegrad")
    with pytest.raises(TypeError, match="cannot be pickled or deep-copied"):
        duplicate(state)


def test_a_hook_without_a_process_group_says_so() -> None:
    state, _ = bagua.comm_hook("bytegrad")
    bucket: Any = type("Bucket", (), {"buffer": lambda self: torch.zeros(3)})()
    with pytest.raises((RuntimeError, ValueError), match="process group"):
        state.run(bucket)


def test_a_copy_of_group_options_is_independent() -> None:
    options = bagua.Options(is_high_priority_stream=True)
    duplicate = copy.copy(options)
    duplicate.is_high_priority_stream = False
    assert options.is_high_priority_stream


@pytest.mark.parametrize(
    "arguments", [{"timeout": "long"}, {"priority": 1}, {"is_high_priority_stream": "yes"}], ids=str
)
def test_wrong_group_options_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        bagua.Options(**arguments)
