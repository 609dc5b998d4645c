# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests with Lightning."""

from collections.abc import Iterator

import pytest
from ranks import RankPool


@pytest.fixture(scope="package")
def pair() -> Iterator[RankPool]:
    """Two ranks, kept from test to test, which Lightning takes for processes that a launcher started."""
    with RankPool(2, "bagua") as pool:
        yield pool
