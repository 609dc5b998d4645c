#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes python_shim/bagua/_registration.pyi from the registry of algorithms, so that an editor completes options.

A test compares the two. Run it when options have changed, with the package that holds them installed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import bagua
from bagua._registry import AlgorithmInfo

STUB = Path(__file__).parents[1] / "python_shim" / "bagua" / "_registration.pyi"
_HEAD = """\
# SPDX-License-Identifier: Apache-2.0
# Written by scripts/typed_options.py.
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bagua._handle import Handle, OptionArgument
from bagua._hooks import HookState
from bagua._managed import Manager
from bagua._optimizers import QAdamOptimizer
"""
# Options that a later build may have, and names that are only known when the program runs.
_ANY = """\
@overload
def {call}(
    {model}algorithm: str,
    {more}process_group: dist.ProcessGroup | None = None,
    {last}**options: OptionArgument,
) -> {result}: ...
"""


_MANAGER = "manager: Manager | None = None,"


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _overload(call: str, info: AlgorithmInfo, first: list[str], result: str, last: Sequence[str] = ()) -> str:
    options = [f"{o['name']}: {o['type']} = {_literal(o['default'])}," for o in info["options"]]
    lines = [*first, "process_group: dist.ProcessGroup | None = None,", *last, "*,", *options]
    text = [info["summary"], "", "Args:"]
    for option in info["options"]:
        sentence = f"{option['name']}: {option['summary']}"
        text += textwrap.wrap(sentence, 108, initial_indent="    ", subsequent_indent="        ")
    doc = textwrap.indent("\n".join([f'"""{text[0]}', *text[1:], '"""']), "    ")
    arguments = "\n".join(f"    {line}" for line in lines)
    return f"@overload\ndef {call}(\n{arguments}\n) -> {result}:\n{doc}\n"


def stub() -> str:
    parts = [_HEAD]
    infos = [bagua.describe(name) for name in bagua.available_algorithms()]
    for info in infos:
        optimizer = f"optimizer: {info['optimizer']}," if info["optimizer"] else "optimizer: Optimizer | None = None,"
        first = ["ddp: DistributedDataParallel,", f'algorithm: Literal["{info["name"]}"],', optimizer]
        # Which algorithms that act on the optimizer cannot have.
        last = [] if info["optimizer"] else [_MANAGER]
        parts.append(_overload("register_comm_hook", info, first, "Handle", last))
    more = "optimizer: Optimizer | None = None,\n    "
    model, last = "ddp: DistributedDataParallel,\n    ", f"{_MANAGER}\n    "
    parts.append(_ANY.format(call="register_comm_hook", model=model, more=more, last=last, result="Handle"))
    result = "tuple[HookState, Any]"
    for info in infos:
        if not info["optimizer"]:
            parts.append(_overload("comm_hook", info, [f'algorithm: Literal["{info["name"]}"],'], result))
    parts.append(_ANY.format(call="comm_hook", model="", more="", last="", result=result))
    return "\n".join(parts).replace("...\n\n@", "...\n@")


if __name__ == "__main__":
    STUB.write_text(stub())
