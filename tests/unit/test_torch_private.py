# SPDX-License-Identifier: Apache-2.0
"""No module of the package but `_torch_private` touches a private name of torch."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import bagua._hooks
import pytest

PACKAGE = Path(bagua._hooks.__file__).parent
HOME = "_torch_private.py"
# Of Lightning and transformers, for which there is no public name.
OF_OTHERS = {"_logger_connector", "_get_output_dir", "_trial"}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@functools.cache
def _names_of_ours() -> set[str]:
    """Return every private name that some module of the package defines: attributes, methods, functions, modules."""
    found = {path.stem for path in PACKAGE.rglob("*.py")} | {path.name for path in PACKAGE.iterdir()} | {"_C"}
    for path in PACKAGE.rglob("*.py"):
        if path.name == HOME:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
                found.add(node.attr)
    stub = ast.parse((PACKAGE / "_C.pyi").read_text())
    of_options = {"_timeout"}  # c10d's name, which our own class of options has too
    found |= {node.target.id for node in ast.walk(stub) if _is_annotated_name(node)} - of_options
    return found


def _is_annotated_name(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def _is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


@functools.cache
def _names_at_home() -> set[str]:
    tree = ast.parse((PACKAGE / HOME).read_text())
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {name for name in attributes | texts if _is_private(name)}


def _touched(source: str, ours: set[str], at_home: set[str]) -> Iterator[str]:
    """Yield what a module takes of torch's private names: imports, attributes, and names in strings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (f"{node.lineno}: import of {part}" for part in parts if _is_private(part))
        elif isinstance(node, ast.Import):
            parts = [part for alias in node.names for part in alias.name.split(".") if alias.name.startswith("torch.")]
            yield from (f"{node.lineno}: import of {part}" for part in parts if _is_private(part))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            is_ours = (node.attr in ours and node.attr not in at_home) or node.attr.startswith("_bagua")
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            is_of_super = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
            if not (is_ours or is_own or is_of_super or node.attr in OF_OTHERS):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and node.value in at_home:
            yield f"{node.lineno}: {node.value!r}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_of_torch_are_in_one_module(path: Path) -> None:
    if path.name == HOME:
        assert len(_names_at_home()) > 20
        return
    assert list(_touched(path.read_text(), _names_of_ours(), _names_at_home())) == []


@pytest.mark.parametrize(
    "source",
    [
        "from torch._utils import flatten",
        "from torch.distributed.distributed_c10d import _world",
        "import torch._dynamo",
        "torch._foreach_mul_(a, 2)",
        "distributed_c10d._world.pg_map",
        "ddp._join_config",
        "ddp.reducer._something_new()",
        "getattr(ddp, '_use_python_reducer')",
        "options._timeout",
    ],
)
def test_such_a_name_is_found(source: str) -> None:
    assert len(list(_touched(source, _names_of_ours(), _names_at_home()))) == 1
