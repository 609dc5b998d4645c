# SPDX-License-Identifier: Apache-2.0
"""DDP's hooks where CPU tensors go the ways of a device: what was sent and what is owed is still what went in."""

from collections.abc import Callable
from typing import Any

import pytest
import test_error_feedback as feedback
import torch
from bagua import _C
from ranks import Pools

Options = dict[str, Any]


def _as_on_device(body: Callable[..., Any], *args: Any) -> Any:
    with _C.AsOnDevice():
        assert not _C.works_on_cpu(torch.zeros(1))
        result = body(*args)
    assert _C.works_on_cpu(torch.zeros(1))
    return result


@pytest.mark.parametrize("options", feedback.ALGORITHMS, ids=str)
def test_what_is_owed_to_a_parameter_that_no_rank_used_stays_owed(rank_pools: Pools, options: Options) -> None:
    rank_pools[2].run(_as_on_device, feedback._unused, options, False, True)


@pytest.mark.parametrize("options", feedback.ALGORITHMS, ids=str)
def test_a_step_that_is_lost_leaves_no_trace_in_any_bucket(rank_pools: Pools, options: Options) -> None:
    rank_pools[2].run(_as_on_device, feedback._lost, options, False)


@pytest.mark.parametrize("options", feedback.ALGORITHMS, ids=str)
def test_what_is_owed_changes_its_scale_with_the_loss(rank_pools: Pools, options: Options) -> None:
    rank_pools[2].run(_as_on_device, feedback._scaled, options)


@pytest.mark.parametrize("options", feedback.ALGORITHMS, ids=str)
def test_a_checkpoint_continues_with_all_bits(rank_pools: Pools, options: Options) -> None:
    assert rank_pools[2].run(_as_on_device, feedback._continued, options, 2, {}) == [True] * 2
