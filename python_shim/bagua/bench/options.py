# SPDX-License-Identifier: Apache-2.0
"""What the user asks for, checked before any rank starts."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import bagua
from bagua import _build_info
from bagua._native import _C
from bagua._registry import describe
from bagua.bench.collectives import COLLECTIVES
from bagua.bench.emulated_hosts import Network, buffer_of, congestion_of, rate_of, share_of, time_of
from bagua.bench.shapes import Shapes, add_arguments, argument_of, named_by
from bagua.info.ranks import is_under_a_launcher

_LINE = ("rate", "delay", "loss", "jitter", "buffer", "packet", "congestion")
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
_DTYPES_BY_SIZE = {2: "bfloat16", 4: "float32", 8: "float64"}
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
_DESCRIPTION = """\
Times collectives and algorithms over a range of sizes, as nccl-tests does for NCCL.

Starts its own ranks on this machine, or uses those that torchrun has started (on several machines, too).
A test is a collective of torch.distributed or an algorithm of bagua; "collectives" and "algorithms" stand
for all of a kind.
"""
_EPILOG = f"""\
collectives:  {", ".join(COLLECTIVES)}
algorithms:   {", ".join(bagua.available_algorithms())}

columns:
  time     of one call in microseconds: minimum, median and maximum over the iterations, each that of the
           slowest rank. An iteration of a collective is as many calls, one after another, as take 10 ms,
           and at least one; its time is their mean. An algorithm's iteration is one training step without
           arithmetic of its own: forward, backward and optimizer of a DistributedDataParallel model with one parameter
           of this size. With --model, --sizes or --script it has their parameters, and --compute is slept.
  algbw    size / median time, in GB/s (1e9 bytes); the time includes a model's arithmetic
  busbw    algbw times the bytes that a rank has to send per byte of size, whatever the implementation
           (2 (n-1)/n for all_reduce and for algorithms): comparable with the speed of the link
  sent     bytes that a rank sent to others in a step, counted by the algorithm (algorithms only)
  check    whether results agree with what each rank computes by itself
  tcp      with several hosts: the congestion control of the connections that were used, as the kernel tells
  resent   packets that the kernels took for lost and sent again, of those they sent in the iterations
  rtt      round trip that the kernels saw, in milliseconds, with what waits in queues
  ratio    with --vs: the other backend's median time / ours. Both are measured in turn, iteration by
           iteration. Algorithms are compared with DistributedDataParallel's own all-reduce on the other backend.

examples:
  python -m bagua.bench all_reduce --vs gloo
  python -m bagua.bench algorithms -b 1M -e 64M --ranks 4 --hosts 2 --plot bench.png
  python -m bagua.bench all_reduce bytegrad --hosts 2 --rate 1G --delay 10ms --vs gloo
  python -m bagua.bench bytegrad --hosts 2 --rate 1G --delay 50ms --buffer 50ms --loss 0.1% --congestion cubic
  python -m bagua.bench --model gpt2 --compute 80ms --hosts 2 --rate 1G --delay 10ms --vs gloo
  torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m bagua.bench bytegrad
"""


@dataclass(frozen=True)
class Settings:
    """What to measure and where to write it."""

    tests: tuple[str, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    ranks: int
    hosts: int
    # What lies between emulated hosts; None: hosts only by name.
    network: Network | None
    device: str
    iterations: int
    warmup: int
    options: dict[str, Any]
    vs: str | None
    # The model that algorithms are measured on; None: a vector of each of the sizes.
    shapes: Shapes | None
    is_checked: bool
    json: Path | None
    plot: Path | None


def size_in_bytes(text: str) -> int:
    """Read a number of bytes such as 512, 4K, 64M or 1G."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write bytes, such as 512, 4K, 64M or 1G")
    return int(match[1]) << _UNITS[match[2].upper()]


def sizes_between(first: int, last: int, factor: float) -> tuple[int, ...]:
    """Return first, first * factor, ... up to last, in whole bytes, each once."""
    sizes = []
    size = float(first)
    while int(size) <= last:
        sizes.append(int(size))
        size *= factor
    return tuple(dict.fromkeys(sizes))


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not an option: write name=value, such as hierarchical=false")
    try:
        # False as Python spells it, too.
        return name, json.loads(value.lower() if value in ("True", "False") else value)
    except json.JSONDecodeError:
        return name, value  # a word, such as peer_selection_mode=shift_one


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bagua.bench",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "tests", nargs="*", metavar="TEST", help="what to time, see below (collectives, algorithms of a model)"
    )
    what = parser.add_argument_group("what is sent")
    what.add_argument("-b", "--begin", type=size_in_bytes, metavar="SIZE", help="smallest size (4K)")
    what.add_argument("-e", "--end", type=size_in_bytes, metavar="SIZE", help="largest size (16M)")
    what.add_argument("-f", "--factor", type=float, help="from one size to the next (8)")
    what.add_argument(
        "-d",
        "--dtypes",
        nargs="+",
        choices=_DTYPES,
        metavar="DTYPE",
        help="some of %(choices)s (float32, or the model's)",
    )
    what.add_argument(
        "-o",
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option for the algorithms that know it; on a single host hierarchical=false is the default here, "
        "because hierarchical algorithms compress between hosts only",
    )
    add_arguments(parser, is_required=False)
    where = parser.add_argument_group("where")
    where.add_argument("--ranks", type=_positive, help="how many ranks to start (2, or one per GPU)")
    where.add_argument(
        "--hosts",
        type=_positive,
        default=1,
        help="let the ranks take themselves for so many hosts: CPU tensors then travel over the loopback interface",
    )
    where.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where tensors are (auto)")
    line = parser.add_argument_group("line between the hosts", "Hosts are then network namespaces, which needs root.")
    line.add_argument("--rate", type=argument_of(rate_of), metavar="RATE", help="bits per second of a host: 1G")
    line.add_argument("--delay", type=argument_of(time_of), metavar="TIME", help="round trip: 10ms")
    line.add_argument("--loss", type=argument_of(share_of), metavar="SHARE", help="packets that get lost: 0.1%%")
    line.add_argument(
        "--jitter", type=argument_of(time_of), metavar="TIME", help="what packets take longer at most, each way: 5ms"
    )
    line.add_argument(
        "--buffer", metavar="SIZE", help="queue in front of the line, which drops packets when it is full: 50ms, 256K"
    )
    line.add_argument("--packet", type=_positive, metavar="BYTES", help=f"largest IP packet ({Network.packet})")
    line.add_argument(
        "--congestion",
        type=argument_of(congestion_of),
        metavar="NAME[,NAME]",
        help="TCP's congestion control, and another that a process may choose: cubic, or cubic,bbr (the kernel's)",
    )
    how = parser.add_argument_group("how")
    how.add_argument("-n", "--iterations", type=_positive, default=20, help="timed iterations of each size (20)")
    how.add_argument("-w", "--warmup", type=int, default=5, help="calls before them (5)")
    how.add_argument("--vs", metavar="BACKEND", help="another backend of torch to compare with: gloo, nccl")
    how.add_argument("--no-check", dest="is_checked", action="store_false", help="do not verify results")
    out = parser.add_argument_group("output besides the table")
    out.add_argument("--json", type=Path, metavar="FILE", help="all figures, with the versions they were measured with")
    out.add_argument("--plot", type=Path, metavar="FILE", help="a picture (png, svg, pdf) of times and bandwidths")
    return parser


def parse(arguments: Sequence[str]) -> Settings:
    """Read the command line; ends the process with a sentence where something is wrong with it."""
    parser = _parser()
    mark = [*arguments, "--"].index("--")
    args = parser.parse_args(arguments[:mark])
    if not args.script:
        args = parser.parse_args(arguments)
    names_model = bool(args.model or args.sizes or args.script)
    tests = _tests(parser, args.tests or ["algorithms" if names_model else "collectives"])
    if names_model and (args.begin or args.end or args.factor):
        parser.error("-b, -e and -f are about a vector: a model has its own shapes, leave them out")
    if names_model and set(tests) & set(COLLECTIVES):
        parser.error("collectives have no model: name algorithms, or leave the model out")
    if args.script and is_under_a_launcher():
        parser.error("--script runs alone: write its shapes into a file for --sizes, or leave the launcher out")
    if args.compute and not names_model:
        parser.error("--compute is the arithmetic of a model: name it by --model, --sizes or --script")
    options = dict(args.option)
    _check_options(parser, tests, options)
    begin, end = args.begin or 4 << 10, args.end or 16 << 20
    factor = 8.0 if args.factor is None else args.factor
    if begin > end:
        parser.error(f"-b {begin} is larger than -e {end}: no size lies between them")
    if factor <= 1:
        parser.error(f"-f {factor:g} does not lead to larger sizes: take more than 1")
    shapes = named_by(parser, args, arguments[mark + 1 :])
    dtypes = args.dtypes or [_DTYPES_BY_SIZE[shapes.parameters[0].itemsize] if shapes else "float32"]
    whole = [dtype for dtype in dtypes if not getattr(torch, dtype).is_floating_point]
    if whole and set(tests) - set(COLLECTIVES):
        parser.error(f"algorithms exchange floating-point numbers: leave {', '.join(whole)} to the collectives")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: type 'pip install matplotlib', or leave --plot out")
    device = _device(parser, args.device)
    ranks = _ranks(parser, args.ranks, device)
    if args.hosts > ranks:
        parser.error(f"--hosts {args.hosts} needs as many ranks, there are {ranks}: raise --ranks")
    if args.hosts > 1 and is_under_a_launcher():
        parser.error("--hosts is for ranks that bagua.bench starts itself: under torchrun set BAGUA_HOST_ID")
    _check_backend(parser, args.vs, device)
    for path in (args.json, args.plot):
        if path and not path.absolute().parent.is_dir():
            parser.error(f"{path} cannot be written: make the folder {path.absolute().parent} first")
    return Settings(
        tests=tests,
        sizes=sizes_between(begin, end, factor),
        dtypes=tuple(dtypes),
        ranks=ranks,
        hosts=args.hosts,
        network=_network(parser, args, device),
        device=device,
        iterations=args.iterations,
        warmup=max(args.warmup, 0),
        options=options,
        vs=args.vs,
        shapes=shapes,
        is_checked=args.is_checked,
        json=args.json,
        plot=args.plot,
    )


def _network(parser: argparse.ArgumentParser, args: argparse.Namespace, device: str) -> Network | None:
    given = [f"--{name}" for name in _LINE if getattr(args, name) is not None]
    if not given:
        return None
    if is_under_a_launcher():
        parser.error(f"{given[0]} is for hosts that bagua.bench makes itself: leave it out under torchrun")
    if args.hosts < 2:
        parser.error(f"{given[0]} is about a network between hosts: add --hosts 2")
    if device != "cpu":
        parser.error(f"{given[0]} makes hosts out of this machine, whose GPUs they would share: add --device cpu")
    rate = args.rate or 0.0
    try:
        return Network(
            bits_per_second=rate,
            round_trip=args.delay or 0.0,
            loss=args.loss or 0.0,
            jitter=args.jitter or 0.0,
            buffer=buffer_of(args.buffer, rate) if args.buffer else Network.buffer,
            packet=args.packet or Network.packet,
            congestion=args.congestion or (),
        )
    except ValueError as error:
        parser.error(f"--buffer: {error}")


def _tests(parser: argparse.ArgumentParser, names: Sequence[str]) -> tuple[str, ...]:
    kinds = {"collectives": list(COLLECTIVES), "algorithms": bagua.available_algorithms()}
    known = [name for kind in kinds.values() for name in kind]
    tests: list[str] = []
    for name in names:
        if name not in kinds and name not in known:
            meant = _C.suggestion_for(name, [*kinds, *known])
            parser.error(f"there is no test {name!r}{meant}: choose from collectives, algorithms, {', '.join(known)}")
        tests += kinds.get(name, [name])
    return tuple(dict.fromkeys(tests))


def options_of(algorithm: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options among `given` that an algorithm knows."""
    known = {option["name"] for option in describe(algorithm)["options"]}
    return {name: value for name, value in given.items() if name in known}


def _check_options(parser: argparse.ArgumentParser, tests: Sequence[str], options: dict[str, Any]) -> None:
    algorithms = [name for name in tests if name not in COLLECTIVES]
    unknown = options.keys() - {name for test in algorithms for name in options_of(test, options)}
    try:
        if unknown and algorithms:
            _C.check_options(algorithms[0], {name: options[name] for name in sorted(unknown)})
        for algorithm in algorithms:
            _C.check_options(algorithm, options_of(algorithm, options))
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    if unknown:
        parser.error(f"--option {', '.join(sorted(unknown))}: collectives have no options, name an algorithm")


def _device(parser: argparse.ArgumentParser, device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() and _build_info.CUDA_VERSION else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no usable GPU: take --device cpu, or see what `python -m bagua.info` says")
    return device


def _ranks(parser: argparse.ArgumentParser, asked: int | None, device: str) -> int:
    if is_under_a_launcher():
        ranks = int(os.environ["WORLD_SIZE"])
        if asked not in (None, ranks):
            parser.error(f"--ranks {asked}, but the launcher has started {ranks}: leave --ranks out")
    else:
        gpus = torch.cuda.device_count() if device == "cuda" else 0
        ranks = asked or max(gpus, 2)
        if device == "cuda" and ranks > gpus:
            parser.error(f"{ranks} ranks need as many GPUs, this machine has {gpus}: lower --ranks or use --device cpu")
    if ranks < 2:
        parser.error("communication takes at least two ranks")
    return ranks


def _check_backend(parser: argparse.ArgumentParser, backend: str | None, device: str) -> None:
    if backend is None:
        return
    if backend not in torch.distributed.Backend.backend_list:
        known = [name for name in torch.distributed.Backend.backend_list if name not in ("undefined", "bagua")]
        meant = _C.suggestion_for(backend, known)
        parser.error(f"torch has no backend {backend!r} for --vs{meant}: choose from {', '.join(known)}")
    if device == "cpu" and backend == "nccl":
        parser.error("nccl takes CUDA tensors only: compare with gloo, or add --device cuda")
