# SPDX-License-Identifier: Apache-2.0
"""Which steps of an optimizer count."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from bagua._step_count import StepCount
from torch.distributed.checkpoint.state_dict import get_state_dict


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        torch.optim.SGD,
        partial(torch.optim.SGD, momentum=0.9),
        partial(torch.optim.SGD, lr=torch.tensor(1e-4)),
    ],
)
def test_of_steps_at_rate_0_those_with_gradients_count(make: Callable[..., torch.optim.Optimizer]) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = make(model.parameters())
    count = StepCount(optimizer)
    count.watch_end()
    before = count.progress
    # Where there is no state it makes some, by a step with gradients of zeros.
    get_state_dict(model, optimizer)
    assert count.progress == before
    optimizer.param_groups[0]["lr"] = 0.0
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert count.progress.step == before.step + 1
