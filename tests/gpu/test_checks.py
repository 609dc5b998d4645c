# SPDX-License-Identifier: Apache-2.0
"""Every check with each number of ranks that it is for, and with ranks that share a GPU."""

from typing import Any

import pytest
from check import Check, Wrong
from checks import CHECKS
from ranks import POOLS, RankPool, run_ranks

pytestmark = pytest.mark.any_device


def _cases() -> list[object]:
    return [
        pytest.param(
            check,
            pool,
            id=f"{check.name}-{pool[0]}-ranks{'-sharing' * pool[1]}",
            marks=[pytest.mark.cuda_only] * check.cuda_only,
        )
        for check in CHECKS.values()
        for pool in POOLS
        if pool[0] in check.sizes
    ]


@pytest.mark.parametrize(("check", "pool"), _cases())
def test_check(check: Check, pool: tuple[int, bool], all_pools: dict[tuple[int, bool], RankPool]) -> None:
    if check.hosts or check.group_timeout:
        env = {"BAGUA_HOST_ID": list(check.hosts)} if check.hosts else {}
        limit, group_timeout = check.seconds, check.group_timeout or 60.0
        settings: dict[str, Any] = {"timeout": limit, "group_timeout": group_timeout, "env": env, "dying": check.dying}
        said = run_ranks(pool[0], check.function, *check.arguments, **settings)
    else:
        said = all_pools[pool].run(check.function, *check.arguments, timeout=120.0)
    assert not [words for words in said if isinstance(words, Wrong)]
