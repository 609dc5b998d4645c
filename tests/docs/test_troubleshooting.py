# SPDX-License-Identifier: Apache-2.0
"""Error texts of others that the troubleshooting page explains are the ones that users see."""

import bagua
import pytest
import torch.distributed as dist
from torch import nn
from troubleshooting import is_explained


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_launcher")
def test_torch_without_a_launcher() -> None:
    with pytest.raises(ValueError, match="RANK") as caught:
        dist.init_process_group("bagua")
    assert is_explained(caught.value), caught.value


@pytest.mark.usefixtures("no_launcher")
def test_accelerate_with_a_backend_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    state = pytest.importorskip("accelerate.state")
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ValueError, match="backend") as caught:
        state.PartialState(cpu=True, backend="bagua")
    state.PartialState._reset_state()
    assert is_explained(caught.value), caught.value


def test_a_model_that_is_not_wrapped() -> None:
    with pytest.raises(TypeError) as caught:
        bagua.register_comm_hook(nn.Linear(2, 2), "bytegrad")  # type: ignore[arg-type]
    assert is_explained(caught.value), caught.value
