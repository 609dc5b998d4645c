# SPDX-License-Identifier: Apache-2.0
"""`python -m bagua.bench plan`: what each algorithm would make of a step of the user's model on the user's line."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bagua._message_bytes import Parameter, coded_bytes
from bagua._native import _C
from bagua.bench.cost_model import WAYS, Line, Price, Step, fragment_seconds, step_seconds, total_bytes
from bagua.bench.emulated_hosts import rate_of, share_of, time_of
from bagua.bench.processor import slowness as measured_slowness
from bagua.bench.shapes import Shapes, add_arguments, argument_of, named_by
from bagua.info import congestion
from bagua.info.ranks import is_under_a_launcher

PRICES = Path(__file__).with_name("prices.json")
_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "quantized_allreduce, 4bit": ("quantized_allreduce", {}),
    "powersgd, rank 4": ("powersgd", {"rank": 4}),
}
# More loss than with float32, see docs/convergence.md.
_LOSSES = {
    "gloo": "none",
    "gloo, fp16 hook": "not measured",
    "gradient_allreduce": "none",
    "bytegrad": "none seen",
    "quantized_allreduce, 4bit": "-0.6 to 0.5 %",
    "powersgd, rank 4": "1 % (transformer), 3 to 8 % (conv), may diverge",
    "qadam": "0 to 3 % (freeze late)",
    "low_precision_decentralized": "as decentralized",
    "decentralized": "1 to 3 %",
    "async": "0 to 3 %",
    "local_sgd": "0.4 to 3.2 %",
    "diloco": "0.7 to 15 %",
}
_OF_SEVERAL_HOSTS = "With 4 hosts times were up to 24 % too short, with 8 on two cores two thirds; more are untried."
_FEWEST_STEPS = 30
_FRAGMENTS = 4
_PROG = "python -m bagua.bench plan"


def options_of_way(way: str) -> tuple[str, dict[str, Any]]:
    """Return the algorithm, "" for what is torch's, and its options."""
    return _OPTIONS.get(way, ("" if way.startswith("gloo") else way, {}))


@dataclass(frozen=True)
class Row:
    """What is foretold of a way: seconds of a step, bytes that a host sends in one, and the line to paste."""

    way: str
    seconds: float
    sent: float
    loss: str
    code: str


def rows(parameters: Sequence[Parameter], compute: float, line: Line, slowness: float = 1.0) -> list[Row]:
    """Return what is foretold of every way, the fastest first behind DDP over Gloo."""
    step = Step.of(parameters, compute)
    plain = total_bytes(parameters)
    prices = {way: Price(**price) for way, price in json.loads(PRICES.read_text()).items()}
    found = []
    for way, kind in WAYS.items():
        algorithm, options = options_of_way(way)
        sent = plain / (2 if "fp16" in way else 1)
        if algorithm:
            sent = coded_bytes(_C.check_options(algorithm, options), parameters)
        seconds = step_seconds(way, prices[way], step, sent, line, slowness)
        found.append(Row(way, seconds, kind.copies(line.hosts) * sent, _LOSSES[way], _code(algorithm, options)))
    found += _in_rounds(parameters, compute, line)
    stock, *others = found
    return [stock, *sorted(others, key=lambda row: row.seconds)]


def _in_rounds(parameters: Sequence[Parameter], compute: float, line: Line) -> list[Row]:
    """Return what exchanges weights now and then."""
    plain = total_bytes(parameters)
    each_way = 2 * (line.hosts - 1) / line.hosts * plain
    whole = fragment_seconds(line, plain, plain)
    found = []
    every = max(8, math.ceil(whole / compute))
    found.append(Row("async", compute, each_way / every, _LOSSES["async"], _code("async", {})))
    steps = max(_FEWEST_STEPS, every)
    code = _code("local_sgd", {"sync_every": steps})
    found.append(Row("local_sgd", compute + whole / steps, each_way / steps, _LOSSES["local_sgd"], code))
    coded = coded_bytes(_C.check_options("diloco", {"codec": "4bit"}), parameters)
    delay = math.ceil(fragment_seconds(line, coded / _FRAGMENTS, plain / _FRAGMENTS) / compute) + 1
    steps = max(_FEWEST_STEPS, _FRAGMENTS * (delay + 1))
    sent = each_way * coded / plain / steps
    found.append(Row("diloco", compute, sent, _LOSSES["diloco"], _code("diloco", {"codec": "4bit"})))
    return found


def _code(algorithm: str, options: Mapping[str, Any]) -> str:
    if not algorithm:
        return ""
    needed = _C.algorithm_info(algorithm)["optimizer"]
    words = [repr(algorithm).replace("'", '"'), *(["optimizer=optimizer"] if needed else [])]
    words += [f"{name}={json.dumps(value)}" for name, value in options.items()]
    return f"bagua.register_comm_hook(model, {', '.join(words)})"


def table(parameters: Sequence[Parameter], compute: float, line: Line, what: str, slowness: float = 1.0) -> str:
    """Return the plan as text."""
    plain = total_bytes(parameters)
    found = rows(parameters, compute, line, slowness)
    lines = [
        f"# {what}: {sum(p.elements for p in parameters) / 1e6:,.1f} million parameters, {plain / 1e6:,.1f} MB of "
        f"gradients, {1e3 * compute:,.0f} ms of arithmetic a step",
        f"# {line.hosts} hosts, {_name_of(line)}. What exchanges weights beside the training is taken for free.",
        _of_processor(slowness),
        "# Within 15 % on lines left out: 68 of 81 and 38 of 45 cells with BBR, 49 of 54 with cubic, 21 of 24 with "
        "losses, without Gloo.",
        f"{'':<30}{'ms a step':>10}{'DDP / this':>12}{'MB a step':>11}  more loss than float32, in small models",
    ]
    if line.hosts > 2:
        lines.insert(2, f"# {_OF_SEVERAL_HOSTS}")
    for row in found:
        ratio = found[0].seconds / row.seconds
        lines.append(
            f"{_name(row.way):<30}{1e3 * row.seconds:>10,.0f}{ratio:>12.2f}{row.sent / 1e6:>11,.2f}  {row.loss}"
        )
    lines += ["", *(f"{row.code}" for row in found if row.code)]
    return "\n".join(lines)


def _name_of(line: Line) -> str:
    name = f"{line.bits_per_second / 1e6:,g} Mbit/s, {1e3 * line.round_trip:g} ms round trip"
    if line.loss or line.yields:
        name += f", {100 * line.loss:g} % lost, {'another congestion control than BBR' if line.yields else 'BBR'}"
    return name


def _of_processor(slowness: float) -> str:
    return f"# A processor that takes {slowness:.2g} times as long as that of the prices: --processor {slowness:.2g}"


def table_of_hosts(shapes: Shapes, compute: float, line: Line, hosts: Sequence[int], slowness: float = 1.0) -> str:
    """Return the milliseconds of a step with every algorithm for several numbers of hosts, as text."""
    parameters = shapes.parameters
    plans = [rows(parameters, compute, replace(line, hosts=number), slowness) for number in hosts]
    columns = [{row.way: row for row in plan} for plan in plans]
    lines = [
        f"# {shapes.name}: {total_bytes(parameters) / 1e6:,.1f} MB of gradients, {1e3 * compute:,.0f} ms of arithmetic "
        f"a step, {_name_of(line)}",
        _of_processor(slowness),
        f"# Milliseconds of a step, predicted. {_OF_SEVERAL_HOSTS}",
        f"{'hosts':<30}" + "".join(f"{number:>10,}" for number in hosts),
    ]
    lines += [
        f"{_name(way):<30}" + "".join(f"{1e3 * column[way].seconds:>10,.0f}" for column in columns)
        for way in columns[-1]
    ]
    return "\n".join(lines)


def _name(way: str) -> str:
    return "DDP over Gloo" + way.removeprefix("gloo") if way.startswith("gloo") else way


def _slowness_of(text: str) -> float:
    if 0 < (times := float(text)) < math.inf:
        return times
    raise ValueError(f"{text!r}: a processor takes more than 0 times as long; 1 is that of the prices")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        description="Predicts a training step with every algorithm: time, bytes, price in loss, what to write.",
        epilog="examples:\n"
        f"  {_PROG} --model gpt2 --compute 80ms --rate 1G --delay 10ms\n"
        f"  {_PROG} --script train.py --rate 100M --delay 50ms --hosts 4\n"
        f"  {_PROG} --model gpt2 --compute 80ms --rate 10G --delay 1ms --hosts 8 64 256 1024\n"
        f"  torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m bagua.bench plan "
        "--model gpt2 --compute 80ms",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, is_required=True)
    parser.add_argument(
        "--rate", type=argument_of(rate_of), help="what a host can send, as 1G (under torchrun it is measured)"
    )
    parser.add_argument("--delay", type=argument_of(time_of), default=0.0, help="round trip between hosts, as 10ms (0)")
    parser.add_argument("--loss", type=argument_of(share_of), default=0.0, help="packets that get lost, as 0.1%% (0)")
    parser.add_argument("--congestion", help="TCP's congestion control, as cubic (this host's)")
    parser.add_argument(
        "--hosts", type=int, nargs="+", default=[], metavar="N", help="how many hosts train together (2); or several"
    )
    parser.add_argument(
        "--processor",
        type=argument_of(_slowness_of),
        metavar="TIMES",
        help="how many times as long as that of the prices the hosts' processor takes; by default this one is measured",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Print the plan; under torchrun rank 0 does, once the line is measured."""
    parser = _parser()
    mark = [*arguments, "--"].index("--")
    args = parser.parse_args(arguments[:mark])
    is_launched = is_under_a_launcher()
    if not is_launched and not args.rate:
        parser.error("the line is unknown: give --rate, and --delay, or start it with torchrun on two hosts")
    if not args.script and not args.compute:
        parser.error("the arithmetic is unknown: give --compute, as 80ms, or --script train.py")
    shapes = named_by(parser, args, arguments[mark + 1 :])
    assert shapes is not None
    assert shapes.compute is not None
    parameters, compute = shapes.parameters, shapes.compute
    yields = (args.congestion or congestion.in_use()) != congestion.BBR
    brings_bbr = not args.congestion and args.loss > 0 and congestion.BBR in congestion.allowed()
    line = Line([*args.hosts, 2][0], args.rate or 1.0, args.delay, 1.0, args.loss, yields, brings_bbr)
    if is_launched and not args.rate:
        if args.loss or args.congestion:
            parser.error("--loss and --congestion belong to a line that is given by --rate: a measured one has its own")
        from bagua.bench.line import measured

        line = measured()
        if line.hosts < 2:
            parser.error("there is no line to measure on one host: start it on two, or give --rate and --delay")
        line = replace(line, hosts=[*args.hosts, line.hosts][0], round_trip=args.delay or line.round_trip)
    if is_launched and os.environ["RANK"] != "0":
        return 0
    if min([line.hosts, *args.hosts]) < 2:
        parser.error("there is nothing to plan on one host: --hosts 2 or more")
    slowness = args.processor or measured_slowness()
    if args.json:
        lines = [replace(line, hosts=hosts) for hosts in args.hosts or [line.hosts]]
        found = [
            {"hosts": one.hosts, "processor": slowness, **vars(row)}
            for one in lines
            for row in rows(parameters, compute, one, slowness)
        ]
        print(json.dumps(found, indent=1))
    elif len(args.hosts) > 1:
        print(table_of_hosts(shapes, compute, line, args.hosts, slowness))
    else:
        print(table(parameters, compute, line, shapes.name, slowness))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
