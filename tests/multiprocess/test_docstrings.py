# SPDX-License-Identifier: Apache-2.0
"""The examples in docstrings that need a process group."""

import doctest
import importlib

import bagua.torch_api
import pytest
import torch
from ranks import on_ranks

MODULES = ["_checks", "algorithms.base", "bucket", "distributed"]


@pytest.mark.parametrize("name", MODULES)
@on_ranks(2)
def test_examples_give_what_they_say(name: str) -> None:
    if not bagua.torch_api.is_initialized():
        bagua.torch_api.init_process_group()
    results = doctest.testmod(importlib.import_module(f"bagua.torch_api.{name}"), extraglobs={"torch": torch})
    assert results.attempted > 0
    assert results.failed == 0
