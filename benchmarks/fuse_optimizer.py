# SPDX-License-Identifier: Apache-2.0
"""Times one optimizer step: plain, torch's foreach=True and fused=True, and bagua's fuse_step.

python benchmarks/fuse_optimizer.py [--device cpu|cuda] [--threads N] [--seconds S] [--models many-small 60M]

What is timed is the step alone, with gradients that are there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from bagua.torch_api.contrib import fuse_optimizer
from torch import nn, optim
from torch.optim import Optimizer

# 100 layers of 32 x 32; and a Transformer encoder of 12 layers with a width of 640.
MODELS: dict[str, list[tuple[int, ...]]] = {
    "many-small": [(32, 32), (32,)] * 100,
    "60M": [*[(640, 640), (640,)] * 4, (640,), (640,), (2560, 640), (2560,), (640, 2560), (640,), (640,), (640,)] * 12,
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD, momentum": lambda parameters, **options: optim.SGD(parameters, lr=1e-3, momentum=0.9, **options),
    "Adam": lambda parameters, **options: optim.Adam(parameters, lr=1e-3, **options),
    "AdamW": lambda parameters, **options: optim.AdamW(parameters, lr=1e-3, **options),
    "Adadelta": lambda parameters, **options: optim.Adadelta(parameters, lr=1e-3, **options),
}


class Variant(NamedTuple):
    """A way to take a step."""

    name: str
    options: dict[str, Any]
    fuses: bool = False


VARIANTS = (
    Variant("step", {}),
    Variant("step, foreach=True", {"foreach": True}),
    Variant("step, fused=True", {"fused": True}),
    Variant("fuse_step", {}, fuses=True),
)


class Bench:
    """Parameters, their gradients and an optimizer that steps them."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], make: Callable[..., Any], variant: Variant, device: str
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]
        self._gradients = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
        optimizer = make(self.parameters, **variant.options)
        self._step = fuse_optimizer(optimizer).fuse_step if variant.fuses else optimizer.step
        self._device = device

    def step(self) -> float:
        for p, gradient in zip(self.parameters, self._gradients, strict=True):
            p.grad = gradient.clone()
        self._wait()
        start = time.perf_counter()
        self._step()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


def _measure(bench: Bench, plain: Bench, seconds: float) -> tuple[float, float]:
    """The medians of steps taken in turns, so that both meet the same load of the machine."""
    times: list[tuple[float, float]] = []
    while sum(one for one, _ in times) < seconds or len(times) < 5:
        times.append((bench.step(), plain.step()))
    one, other = zip(*times, strict=True)
    return statistics.median(one), statistics.median(other)


def _rows(model: str, optimizer: str, device: str, seconds: float) -> Iterator[dict[str, Any]]:
    plain = Bench(MODELS[model], OPTIMIZERS[optimizer], VARIANTS[0], device)
    for _ in range(3):
        plain.step()
    expected = [p.detach().clone() for p in plain.parameters]
    for variant in VARIANTS:
        try:
            bench = Bench(MODELS[model], OPTIMIZERS[optimizer], variant, device)
        except TypeError:  # torch has no such variant of this optimizer
            continue
        for _ in range(3):
            bench.step()
        if variant.fuses and not all(map(torch.equal, bench.parameters, expected)):
            raise AssertionError(f"{variant.name} of {optimizer} is not the plain step")
        median, reference = _measure(bench, plain, seconds)
        yield {
            "model": model,
            "optimizer": optimizer,
            "variant": variant.name,
            "milliseconds": 1e3 * median,
            "times_as_fast": reference / median,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument("--seconds", type=float, default=0.5, help="to measure each line for")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else f"cpu, {arguments.threads} threads"
    print(f"torch {torch.__version__}, {name}")
    for model in arguments.models:
        shapes = MODELS[model]
        count = sum(torch.Size(shape).numel() for shape in shapes)
        print(f"\n{model}: {len(shapes)} parameters, {count / 1e6:.1f} M values")
        print(f"{'optimizer':<16}{'variant':<28}{'ms/step':>10}{'x plain':>10}")
        for optimizer in OPTIMIZERS:
            for row in _rows(model, optimizer, arguments.device, arguments.seconds):
                times = f"{row['milliseconds']:>10.3f}{row['times_as_fast']:>10.2f}"
                print(f"{row['optimizer']:<16}{row['variant']:<28}{times}", flush=True)


if __name__ == "__main__":
    main()
