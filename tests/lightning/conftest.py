# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests with Lightning."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import RankPool, preload


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where only these tests are run the server of ranks imports Lightning for all of them."""
    if all(Path(__file__).parent in item.path.parents for item in session.items):
        preload("lightning.pytorch")


@pytest.fixture(scope="package")
def pair() -> Iterator[RankPool]:
    """Two ranks, kept from test to test, which Lightning takes for processes that a launcher started."""
    with RankPool(2, "bagua") as pool:
        yield pool
