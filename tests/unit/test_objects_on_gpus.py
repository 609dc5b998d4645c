# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other over stock NCCL travels on the GPU of the model, whichever is the current one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from bagua import _C, _executors
from bagua._sharded_rounds import warn_of_replicas_inside_hosts
from bagua._tensors_apart import broadcast_state

GROUP = MagicMock(**{"rank.return_value": 0})


def _hook_on(device: torch.device) -> None:
    _executors.executors_for(GROUP, device)


def _state_on(device: torch.device) -> None:
    broadcast_state({"step": 1}, 0, GROUP, device)


def _rounds_on(device: torch.device) -> None:
    warn_of_replicas_inside_hosts(MagicMock(device=device), "local_sgd")


@pytest.mark.parametrize("call", [_hook_on, _state_on, _rounds_on])
@pytest.mark.parametrize("index", [1, None])
def test_objects_travel_on_the_gpu_that_is_named(
    call: Callable[[torch.device], None], index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This is another one than is named.
    current: list[int | None] = [0]
    travelled_on: list[int | None] = []

    @contextmanager
    def device_index(one: int | None) -> Iterator[None]:
        current.append(one)
        yield
        current.pop()

    def travel(*args: Any, **kwargs: Any) -> None:
        travelled_on.append(current[-1])

    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    monkeypatch.setattr(dist, "all_gather_object", travel)
    monkeypatch.setattr(dist, "broadcast_object_list", travel)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(_C, "executors_over_backend", MagicMock())
    call(torch.device("cuda", index) if index is not None else torch.device("cuda"))
    assert set(travelled_on) == {index}
