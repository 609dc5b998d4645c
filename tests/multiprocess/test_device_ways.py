# SPDX-License-Identifier: Apache-2.0
"""DDP's hooks where CPU tensors go the ways of a device: what was sent and what is owed is still what went in."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import test_error_feedback as feedback
import torch
from bagua import _C
from ranks import on_ranks

with_every_algorithm = pytest.mark.parametrize("options", feedback.ALGORITHMS, ids=str)


@contextmanager
def _as_on_device() -> Iterator[None]:
    with _C.AsOnDevice():
        assert not _C.works_on_cpu(torch.zeros(1))
        yield
    assert _C.works_on_cpu(torch.zeros(1))


@pytest.mark.parametrize(
    ("test", "more"),
    [
        (feedback.test_what_is_owed_to_a_parameter_that_no_rank_used_stays_owed, [False]),
        (feedback.test_a_step_that_is_lost_leaves_no_trace_in_any_bucket, [False]),
        (feedback.test_what_is_owed_changes_its_scale_with_the_loss, []),
    ],
    ids=["unused parameters", "lost steps", "scales"],
)
@with_every_algorithm
@on_ranks(2)
def test_so_it_is_as_on_cpus(options: dict[str, Any], test: Any, more: list[Any]) -> None:
    with _as_on_device():
        test.on_each_rank(options, *more)


@with_every_algorithm
@on_ranks(2)
def test_a_checkpoint_continues_with_all_bits(options: dict[str, Any]) -> None:
    with _as_on_device():
        assert feedback.continued(options, 2, {})
