# SPDX-License-Identifier: Apache-2.0
"""The shapes of a model: of well-known ones, from a file, or from a training script that runs a few steps alone."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from bagua._attachment import names_and_roles
from bagua._message_bytes import Parameter, parameters_of
from bagua.bench.emulated_hosts import time_of

_STEPS, _SETTLING = 8, 3
_Value = TypeVar("_Value")


def _gpt2() -> list[Parameter]:
    """GPT-2 small, whose head is its embedding."""
    found = [Parameter("wte", (50257, 768), "embedding"), Parameter("wpe", (1024, 768), "embedding")]

    def layer(name: str, *shape: int) -> None:
        found.extend([Parameter(f"{name}.weight", shape), Parameter(f"{name}.bias", shape[-1:])])

    for block in range(12):
        layer(f"h.{block}.ln_1", 768)
        layer(f"h.{block}.attn.c_attn", 768, 2304)
        layer(f"h.{block}.attn.c_proj", 768, 768)
        layer(f"h.{block}.ln_2", 768)
        layer(f"h.{block}.mlp.c_fc", 768, 3072)
        layer(f"h.{block}.mlp.c_proj", 3072, 768)
    layer("ln_f", 768)
    return found


def _resnet50() -> list[Parameter]:
    found: list[Parameter] = []

    def layer(name: str, *shape: int) -> None:
        found.append(Parameter(f"{name}.weight", shape))
        found.extend(Parameter(f"{name}.norm.{part}", shape[:1]) for part in ("weight", "bias"))

    layer("conv1", 64, 3, 7, 7)
    inputs = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            name = f"layer{stage + 1}.{block}"
            layer(f"{name}.conv1", width, inputs, 1, 1)
            layer(f"{name}.conv2", width, width, 3, 3)
            layer(f"{name}.conv3", 4 * width, width, 1, 1)
            if block == 0:
                layer(f"{name}.downsample", 4 * width, inputs, 1, 1)
            inputs = 4 * width
    return [*found, Parameter("fc.weight", (1000, 2048), "head"), Parameter("fc.bias", (1000,), "head")]


MODELS: dict[str, Callable[[], list[Parameter]]] = {"gpt2": _gpt2, "resnet50": _resnet50}


class NoShapes(RuntimeError):
    """There are no shapes; the text says why."""


@dataclass(frozen=True)
class Shapes:
    """A model as the bench needs it: its parameters in order, and the seconds of a step's arithmetic, if known."""

    name: str
    parameters: tuple[Parameter, ...]
    compute: float | None

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return sum(parameter.elements for parameter in self.parameters)


def argument_of(reader: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """Return what argparse can call, whose ValueError has a text for the user."""

    def read(text: str) -> _Value:
        try:
            return reader(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _arithmetic_of(text: str) -> float:
    if seconds := time_of(text):
        return seconds
    raise ValueError(f"{text!r} is no arithmetic: write the time of a step without communication, such as 80ms")


def add_arguments(parser: argparse.ArgumentParser, *, is_required: bool) -> None:
    """Let a command line name a model."""
    what = parser.add_mutually_exclusive_group(required=is_required)
    what.add_argument("--model", choices=MODELS, help="shapes of a well-known model: %(choices)s")
    what.add_argument("--sizes", type=Path, metavar="FILE", help="a shape a line, as 768x3072 or 'name 768x3072'")
    what.add_argument(
        "--script",
        metavar="TRAIN.PY",
        help="a training script, which runs alone until its optimizer has taken a few steps: shapes and arithmetic are "
        "its own (what comes after -- are its arguments)",
    )
    arithmetic = "arithmetic of a step, as 80ms (with --script it is measured)"
    parser.add_argument("--compute", type=argument_of(_arithmetic_of), help=arithmetic)


def named_by(parser: argparse.ArgumentParser, args: argparse.Namespace, of_script: Sequence[str]) -> Shapes | None:
    """Return the model that these arguments name, if they do; `of_script` are the script's own.

    A file that cannot be read as shapes, or a script that takes too few steps, ends the process with a sentence.
    """
    if args.script:
        try:
            parameters, seconds = from_script(args.script, of_script)
        except NoShapes as error:
            parser.error(str(error))
        return Shapes(args.script, tuple(parameters), args.compute or seconds)
    if args.sizes:
        try:
            parameters = from_file(args.sizes)
        except (ValueError, OSError) as error:
            parser.error(str(error))
        return Shapes(args.sizes.name, tuple(parameters), args.compute)
    return Shapes(args.model, tuple(MODELS[args.model]()), args.compute) if args.model else None


def from_file(path: Path) -> list[Parameter]:
    """Read a shape a line: 768x3072, or a name before it; one that holds "embed" is taken for an embedding.

    Raises:
        ValueError: a line that is none.
    """
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, shape = f"parameter{number} {line.strip()}".rpartition(" ")
        if re.fullmatch(r"\d+(x\d+)*", shape) is None or not math.prod(map(int, shape.split("x"))):
            raise ValueError(f"{path}, line {number}: {line!r} is not a shape: write 768x3072, or a name before it")
        name = name.split()[-1]
        role = "embedding" if "embed" in name else ""
        found.append(Parameter(name, tuple(map(int, shape.split("x"))), role))
    names = {parameter.name for parameter in found}
    if len(names) < max(1, len(found)):
        raise ValueError(f"{path} has no shapes" if not found else f"{path}: two parameters have the same name")
    return found


class _Enough(BaseException):
    """Ends a script that has taken its steps; no handler of Exception stops it."""


def from_script(script: str, arguments: Sequence[str]) -> tuple[list[Parameter], float]:
    """Run a training script as the only rank, and return its model's shapes and the seconds of a step.

    Raises:
        NoShapes: there is no such script, or its optimizer took too few steps.
    """
    if not Path(script).is_file():
        raise NoShapes(f"{script}: there is no such file")
    moments: list[float] = []
    models: list[DistributedDataParallel] = []
    optimizers: list[Any] = []
    wrap = DistributedDataParallel.__init__

    def noting(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        wrap(self, *args, **kwargs)
        models.append(self)

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        optimizers.append(optimizer)
        moments.append(time.perf_counter())
        if len(moments) > _STEPS:
            raise _Enough

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    before, sys_argv = dict(os.environ), sys.argv
    os.environ.update(alone)
    # With it the script would ask the store of torchrun, which is not where `alone` says.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    hook = register_optimizer_step_post_hook(after_step)
    DistributedDataParallel.__init__ = noting  # type: ignore[method-assign]
    try:
        runpy.run_path(script, run_name="__main__")
    except _Enough:
        pass
    except SystemExit as end:
        # A script that has come to its last line may end so, too.
        if end.code:
            raise NoShapes(f"{script} ended with {end.code!r}") from None
    finally:
        DistributedDataParallel.__init__ = wrap  # type: ignore[method-assign]
        hook.remove()
        sys.argv = sys_argv
        sys.path.remove(str(Path(script).resolve().parent))
        os.environ.clear()
        os.environ.update(before)
        if dist.is_initialized():
            dist.destroy_process_group()
    if len(moments) <= _SETTLING + 1:
        raise NoShapes(f"{script} ended after {len(moments)} steps of an optimizer: it takes {_STEPS + 1} to know them")
    times = [after - begin for begin, after in itertools.pairwise(moments)]
    compute = statistics.median(times[_SETTLING:])
    if models:
        tensors = [parameter for parameter in models[-1].module.parameters() if parameter.requires_grad]
        return parameters_of(tensors, names_and_roles(models[-1].module, tensors)), compute
    # Those that are frozen have no gradient to send.
    tensors = [p for group in optimizers[-1].param_groups for p in group["params"] if p.requires_grad]
    return parameters_of(tensors, [(f"parameter{number}.weight", "") for number in range(len(tensors))]), compute
