# SPDX-License-Identifier: Apache-2.0
"""Ranks that the tests of a file share, though each may break its group: it begins with new_world()."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from ranks import RankPool
from trouble import LAYOUTS


@pytest.fixture(scope="module")
def layouts() -> Iterator[dict[str, RankPool]]:
    """Return three ranks of each layout, which start when they are used."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(RankPool(3, env=env)) for name, env in LAYOUTS.items()}
