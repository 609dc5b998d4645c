# SPDX-License-Identifier: Apache-2.0
"""The classes of bagua.torch_api.algorithms, which the registry generates, beside the original's documents."""

import inspect
from typing import Any

import bagua
import pytest
from bagua.torch_api.algorithms import (
    Algorithm,
    async_model_average,
    bytegrad,
    decentralized,
    gradient_allreduce,
    q_adam,
)
from torch import nn

# What scripts of the original may give by position, in this order.
POSITIONAL: list[tuple[type[Algorithm], dict[str, Any]]] = [
    (gradient_allreduce.GradientAllReduceAlgorithm, {"hierarchical": True, "average": False}),
    (bytegrad.ByteGradAlgorithm, {"hierarchical": False, "average": False}),
    (
        decentralized.DecentralizedAlgorithm,
        {"hierarchical": False, "peer_selection_mode": "shift_one", "communication_interval": 3},
    ),
    (decentralized.LowPrecisionDecentralizedAlgorithm, {"hierarchical": False, "communication_interval": 3}),
    (
        async_model_average.AsyncModelAverageAlgorithm,
        {"peer_selection_mode": "all", "sync_interval_ms": 7, "warmup_steps": 2},
    ),
]


@pytest.mark.parametrize(("kind", "options"), POSITIONAL, ids=lambda value: getattr(value, "__name__", ""))
def test_documented_options_may_be_given_by_position(kind: type[Algorithm], options: dict[str, Any]) -> None:
    made = kind(*options.values())
    assert {name: vars(made)[name] for name in options} == options
    with pytest.raises(TypeError, match="too many positional"):
        kind(*options.values(), "more")
    with pytest.raises(TypeError, match="'averge'"):
        kind(averge=True)


def test_qadam_takes_its_optimizer_first() -> None:
    optimizer = bagua.QAdamOptimizer(nn.Linear(1, 1).parameters())
    made = q_adam.QAdamAlgorithm(optimizer, False)
    assert vars(made)["q_adam_optimizer"] is optimizer
    assert vars(made)["hierarchical"] is False
    with pytest.raises(TypeError, match=r"must be a QAdamOptimizer, got 0\.1"):
        q_adam.QAdamAlgorithm(0.1)  # type: ignore[arg-type]


def test_document_signature_of_async_model_average() -> None:
    """As `async_model_average.AsyncModelAverageAlgorithm` of the original's document."""
    shown = str(inspect.signature(async_model_average.AsyncModelAverageAlgorithm))
    assert shown == "(peer_selection_mode='all', sync_interval_ms=500, warmup_steps=0)"


def test_every_algorithm_has_a_class_with_the_options_and_sentences_of_the_registry() -> None:
    assert set(Algorithm.by_name) == set(bagua.available_algorithms())
    for name, kind in Algorithm.by_name.items():
        info = bagua.describe(name)
        first = {"q_adam_optimizer": bagua.QAdamOptimizer(nn.Linear(1, 1).parameters())} if name == "qadam" else {}
        made = vars(Algorithm.init(name, **first))
        assert {option["name"]: option["default"] for option in info["options"]} == {
            name: value for name, value in made.items() if name not in first
        }
        assert kind.__doc__ is not None
        assert all(text in kind.__doc__ for text in (info["summary"], *(o["summary"] for o in info["options"])))
