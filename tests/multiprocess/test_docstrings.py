# SPDX-License-Identifier: Apache-2.0
"""The examples in docstrings that need a process group."""

import doctest
import importlib

import pytest
import torch
from ranks import on_ranks
from torch_api_calls import started

MODULES = ["_collectives", "algorithms.base", "bucket", "distributed"]


@pytest.mark.parametrize("name", MODULES)
@on_ranks(2)
def test_examples_give_what_they_say(name: str) -> None:
    rank, _ = started()
    module = importlib.import_module(f"bagua.torch_api.{name}")
    results = doctest.testmod(module, extraglobs={"torch": torch, "rank": rank})
    assert results.attempted > 0
    assert results.failed == 0
