# SPDX-License-Identifier: Apache-2.0
"""The short form of the soak; `make soak` is the long one."""

import pytest
from soak_ranks import soak


# 255 calls: one group is renewed on the way.
@pytest.mark.parametrize(
    ("world_size", "layout"), [(2, "one host"), (3, "an uneven pair"), (4, "two hosts"), (8, "one host")]
)
def test_random_operations_give_what_a_plain_reference_gives(world_size: int, layout: str) -> None:
    assert soak(world_size, seed=world_size, operations=255, layout=layout, timeout=240.0) > 255
