# SPDX-License-Identifier: Apache-2.0
"""bagua.torch_api.env, the numbers of ReduceOp, what the import does to torch and what not, examples in docstrings."""

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import bagua.torch_api as api
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api import communication, env
from script_ranks import run_script
from torch import nn

# Getter -> variable, default, a value and what it reads as.
VARIABLES: dict[Callable[[], Any], tuple[str, Any, str, Any]] = {
    env.get_world_size: ("WORLD_SIZE", 1, "8", 8),
    env.get_rank: ("RANK", 0, "3", 3),
    env.get_local_rank: ("LOCAL_RANK", 0, "2", 2),
    env.get_local_size: ("LOCAL_WORLD_SIZE", 1, "4", 4),
    env.get_default_bucket_size: ("BAGUA_DEFAULT_BUCKET_SIZE", 10 * 2**20, "1024", 1024),
}


@pytest.mark.parametrize("getter", VARIABLES, ids=lambda getter: getter.__name__)
def test_getter_reads_its_variable_at_each_call(getter: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    name, default, text, value = VARIABLES[getter]
    monkeypatch.delenv(name, raising=False)
    assert getter() == default
    monkeypatch.setenv(name, text)
    assert getter() == value
    assert type(getter()) is type(value)
    monkeypatch.setenv(name, "")
    assert getter() in (default, "")


def test_number_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ValueError, match="WORLD_SIZE must be a whole number, got 'many'"):
        env.get_world_size()


def test_reduce_op_has_the_numbers_of_the_original() -> None:
    assert {one.name: int(one) for one in api.ReduceOp} == {
        "SUM": 0,
        "PRODUCT": 1,
        "MIN": 2,
        "MAX": 3,
        "BOR": 7,
        "BAND": 8,
        "BXOR": 9,
        "AVG": 10,
    }


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (communication.allreduce, "(tensor, op=<RedOpType.SUM: 0>, comm=None)"),
        (communication.broadcast, "(tensor, root=0, comm=None, *, src=None)"),
        (communication.reduce, "(tensor, dst, op=<RedOpType.SUM: 0>, comm=None)"),
        (communication.init_process_group, "()"),
    ],
    ids=["allreduce", "broadcast", "reduce", "init_process_group"],
)
def test_signature_is_the_documented_one(function: Callable[..., Any], signature: str) -> None:
    shown = inspect.signature(function)
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in shown.parameters.values()]
    assert str(shown.replace(parameters=plain, return_annotation=inspect.Signature.empty)) == signature


def test_nothing_is_initialised_by_the_import() -> None:
    assert not dist.is_initialized()
    assert not api.is_initialized()
    with pytest.raises(RuntimeError, match=r"init_process_group\(\) first"):
        api.barrier()


def _modules() -> list[ModuleType]:
    """Those whose examples need no process group; the others are in tests/multiprocess."""
    names = [
        one.name.removeprefix("bagua.torch_api.") for one in pkgutil.walk_packages(api.__path__, "bagua.torch_api.")
    ]
    alone = [name for name in names if name.split(".")[0] in ("contrib", "env")]
    return [importlib.import_module(f"bagua.torch_api.{name}") for name in alone]


@pytest.mark.parametrize(
    "module", [one for one in _modules() if ">>>" in inspect.getsource(one)], ids=lambda module: module.__name__
)
def test_examples_in_docstrings(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


def test_bagua_alone_patches_nothing(tmp_path: Path) -> None:
    code = (
        "import bagua, torch; print(hasattr(torch.nn.Module, 'with_bagua'), hasattr(torch.Tensor, 'is_bagua_tensor'))"
    )
    assert run_script(code, 1, tmp_path)[0].output.split() == ["False", "False"]


def test_torch_compile_works_with_the_patches() -> None:
    assert api.BaguaModule.with_bagua is nn.Module.with_bagua  # type: ignore[attr-defined]
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    x = torch.randn(2, 3)
    # Dynamo makes modules of its own and reads all attributes of their classes.
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True, dynamic=True)(x), model(x))


def test_every_attribute_of_a_module_that_is_not_wrapped_can_be_read() -> None:
    module = nn.Linear(1, 1)
    assert [name for name in dir(module) if not hasattr(module, name)] == []
