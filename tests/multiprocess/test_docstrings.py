# SPDX-License-Identifier: Apache-2.0
"""The examples in docstrings that need a process group."""

import doctest
import importlib

import bagua.torch_api
import pytest
import torch
from ranks import RankPool

MODULES = ["_checks", "algorithms.base", "bucket", "distributed"]


def _run(name: str) -> None:
    if not bagua.torch_api.is_initialized():
        bagua.torch_api.init_process_group()
    results = doctest.testmod(importlib.import_module(f"bagua.torch_api.{name}"), extraglobs={"torch": torch})
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_say(rank_pools: dict[int, RankPool], name: str) -> None:
    rank_pools[2].run(_run, name)
