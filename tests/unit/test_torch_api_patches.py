# SPDX-License-Identifier: Apache-2.0
"""What importing bagua.torch_api does to torch, and what it does not."""

from pathlib import Path

import bagua.torch_api
import torch
from script_ranks import run_script
from torch import nn


def test_bagua_alone_patches_nothing(tmp_path: Path) -> None:
    code = (
        "import bagua, torch; print(hasattr(torch.nn.Module, 'with_bagua'), hasattr(torch.Tensor, 'is_bagua_tensor'))"
    )
    assert run_script(code, 1, tmp_path)[0].output.split() == ["False", "False"]


def test_torch_compile_works_with_the_patches() -> None:
    assert bagua.torch_api.BaguaModule.with_bagua is nn.Module.with_bagua  # type: ignore[attr-defined]
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    x = torch.randn(2, 3)
    # Dynamo makes modules of its own and reads all attributes of their classes.
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True, dynamic=True)(x), model(x))


def test_every_attribute_of_a_module_that_is_not_wrapped_can_be_read() -> None:
    module = nn.Linear(1, 1)
    assert [name for name in dir(module) if not hasattr(module, name)] == []
