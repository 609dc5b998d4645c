# SPDX-License-Identifier: Apache-2.0
"""Collected where BAGUA_TEST_DEVICE names a device: cuda, or cpu to try the tests themselves. See `make test-gpu`."""

import os

import pytest

collect_ignore_glob = [] if "BAGUA_TEST_DEVICE" in os.environ else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("BAGUA_TEST_DEVICE") == "cuda":
        return
    for item in items:
        if item.get_closest_marker("cuda_only"):
            item.add_marker(pytest.mark.skip(reason="no GPU: of streams and graphs, or of kernels"))
