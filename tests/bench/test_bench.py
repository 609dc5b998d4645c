# SPDX-License-Identifier: Apache-2.0
"""`python -m bagua.bench`, as a user types it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from bagua.bench.collectives import COLLECTIVES, AllReduce, Barrier, Place
from bagua.bench.emulated_hosts import (
    Network,
    NoEmulatedHosts,
    buffer_of,
    congestion_of,
    emulated_hosts,
    rate_of,
    share_of,
    time_of,
)
from bagua.bench.measure import Result, Times
from bagua.bench.options import Settings, parse, size_in_bytes, sizes_between
from bagua.bench.pattern import difference, fill, sums, values
from bagua.bench.report import header, line, verdict
from bagua.bench.training_step import TrainingStep, algorithm
from bagua.info.connections import Line
from ranks import on_ranks
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from two_hosts import hosts_over

# Ranks import torch, on cores that others use too.
SECONDS = 400


def _bench(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    command = [sys.executable, *launcher, "-m", "bagua.bench", *arguments]
    return subprocess.run(
        command, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=SECONDS
    )


@pytest.mark.long
def test_every_test_is_right_and_compared_with_gloo(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib: pip install matplotlib")
    file, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    size = 48_000
    command = f"collectives algorithms --device cpu --ranks 3 -b {size} -e {size} -n 3 -w 1 --vs gloo"
    done = _bench(*command.split(), "--json", str(file), "--plot", str(picture))
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(file.read_text())
    results: dict[str, dict[str, Any]] = {result["test"]: result for result in content["results"]}
    assert list(results) == [*COLLECTIVES, *bagua.available_algorithms()]
    assert content["environment"]["ranks"] == 3
    assert content["environment"]["hosts"] == 1
    for result in results.values():
        assert result["check"] == "", result
        seconds = result["seconds"]
        assert 0 < seconds["minimum"] <= seconds["median"] <= seconds["maximum"]
        assert result["ratio"] == pytest.approx(result["vs"]["median"] / seconds["median"])
        assert result["algbw"] == pytest.approx(result["size"] / seconds["median"])
    assert results["barrier"]["size"] == 0
    for test, factor in {"all_reduce": 4 / 3, "all_gather": 2 / 3, "broadcast": 1, "bytegrad": 4 / 3}.items():
        assert results[test]["busbw"] == pytest.approx(factor * results[test]["algbw"])
    # Three ranks: two thirds of the gradient are sent twice, in four bytes or in one and two more for 128 elements.
    assert results["gradient_allreduce"]["wire_bytes"] == pytest.approx(4 / 3 * size, rel=0.001)
    assert results["bytegrad"]["wire_bytes"] == pytest.approx(4 * 130 * -(-size // 4 // 3 // 128), rel=0.05)
    assert picture.stat().st_size > 10_000
    assert "hierarchical=False" in done.stdout.splitlines()[0]


def test_the_line_between_hosts_is_as_was_asked_for(tmp_path: Path) -> None:
    with hosts_over(Network(round_trip=0.001)):
        pass
    file = tmp_path / "bench.json"
    size, rate, round_trip = 1 << 20, 200e6, 0.01
    command = f"broadcast barrier --device cpu -b {size} -e {size} -n 2 -w 1 --no-check --json {file}"
    line = "--hosts 2 --rate 200M --delay 10ms --loss 1% --buffer 50ms --congestion cubic"
    done = _bench(*command.split(), *line.split())
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(file.read_text())
    expected = "200 Mbit/s, 10 ms round trip, 50 ms buffer, 1 % lost, cubic"
    assert content["environment"]["network"] == expected
    assert content["environment"]["hosts"] == 2
    seconds = {result["test"]: result["seconds"]["minimum"] for result in content["results"]}
    # No rank can leave a barrier before it has heard of the other.
    assert seconds["barrier"] > round_trip / 2
    assert seconds["broadcast"] > 8 * size / rate
    seen = next(result["line"] for result in content["results"] if result["test"] == "broadcast")
    assert seen["congestion"] == ["cubic"]
    assert round_trip <= seen["least_round_trip"] <= seen["round_trip"]
    # Two broadcasts, from rank 0 alone, of which the kernel may still have the end.
    assert seen["segments"] >= 1.5 * size / 1460
    assert 0.002 < seen["resent"] / seen["segments"] < 0.05


def test_what_describes_a_line_is_read() -> None:
    assert (rate_of("0"), rate_of("100M"), rate_of("2.5Gbit")) == (0.0, 100e6, 2.5e9)
    assert (time_of("10ms"), time_of("0.05s"), time_of("200us")) == (0.01, 0.05, pytest.approx(2e-4))
    assert share_of("0.1%") == pytest.approx(0.001)
    assert (buffer_of("50ms", 0.0), buffer_of("128K", 1 << 20)) == (0.05, 1.0)
    assert (congestion_of("cubic"), congestion_of("CUBIC,bbr")) == (("cubic",), ("cubic", "bbr"))
    for reader, wrong in ((rate_of, "fast"), (time_of, "10"), (share_of, "100%"), (share_of, "0.1")):
        with pytest.raises(ValueError, match="write"):
            reader(wrong)
    for text in ("cubic bbr", ""):
        with pytest.raises(ValueError, match="write its name"):
            congestion_of(text)
    with pytest.raises(ValueError, match="write a time or bytes"):
        buffer_of("large", 1e9)
    with pytest.raises(ValueError, match="needs a rate"):
        buffer_of("64K", 0.0)
    with pytest.raises(ValueError, match="without a rate"):
        Network(round_trip=0.1, buffer=0.05)


def test_a_line_is_named_by_all_that_makes_it_worse() -> None:
    assert str(Network(1e9, 0.01)) == "1,000 Mbit/s, 10 ms round trip"
    worst = Network(1e9, 0.01, 0.001, jitter=0.002, buffer=0.05, packet=1400, congestion=("cubic", "bbr"))
    assert str(worst) == (
        "1,000 Mbit/s, 10 ms round trip, 2 ms jitter, 50 ms buffer, 0.1 % lost, 1,400-byte packets, cubic or bbr"
    )


def test_a_congestion_control_that_the_kernel_has_not_is_named() -> None:
    with hosts_over(Network(round_trip=0.001)):
        pass
    with (
        pytest.raises(NoEmulatedHosts, match="no congestion control 'carrier_pigeon', but "),
        emulated_hosts(2, Network(congestion=("carrier_pigeon",))),
    ):
        pass


@pytest.mark.long
def test_ranks_of_torchrun_are_used(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    arguments = ["all_reduce", "--device", "cpu", "-b", "1K", "-e", "4K", "-f", "2", "-n", "2", "-w", "0"]
    done = _bench(*arguments, "-d", "bfloat16", "int8", "--json", str(file), launcher=launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(file.read_text())["results"]
    expected = [(dtype, size) for dtype in ("bfloat16", "int8") for size in (1024, 2048, 4096)]
    assert [(result["dtype"], result["size"]) for result in results] == expected
    assert all(result["check"] == "" and result["vs"] is None for result in results)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("all_reduc", "choose from collectives, algorithms, all_reduce, "),
        ("bytegrd", "no test 'bytegrd' (did you mean 'bytegrad'?)"),
        ("-b 12Q", "is not a size: write bytes, such as 512, 4K"),
        ("-b 2K -e 1K", "no size lies between them"),
        ("-f 1", "take more than 1"),
        ("--ranks 1", "at least two ranks"),
        ("--ranks 2 --hosts 3", "raise --ranks"),
        ("bytegrad -d int8", "leave int8 to the collectives"),
        ("bytegrad -o hierarchy=1", "hierarchical"),
        ("bytegrad -o hierarchical=3", "hierarchical"),
        ("all_reduce -o hierarchical=false", "collectives have no options"),
        ("bytegrad -o hierarchical", "write name=value"),
        ("--vs glou", "choose from gloo"),
        ("--vs glo", "no backend 'glo' for --vs (did you mean 'gloo'?)"),
        ("--vs nccl --device cpu", "nccl takes CUDA tensors only"),
        ("--delay 10ms", "add --hosts 2"),
        ("--hosts 2 --delay 10 --device cpu", "write a number with its unit"),
        ("--hosts 2 --rate fast", "such as 100M, 1G"),
        ("--congestion cubic", "add --hosts 2"),
        ("--hosts 2 --delay 10ms --buffer 64K --device cpu", "needs a rate"),
        ("--json /no/such/folder/file", "make the folder"),
        ("--model gpt2 -b 4K", "leave them out"),
        ("--model gpt2 all_reduce", "collectives have no model"),
        ("--sizes /no/such/file", "No such file"),
        ("bytegrad --compute 80ms", "name it by --model"),
        ("--model gpt2 --compute 0ms", "the time of a step without communication, such as 80ms"),
    ],
)
def test_mistakes_are_named_before_any_rank_starts(
    arguments: str, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as error:
        parse(arguments.split())
    assert error.value.code == 2
    assert expected in capsys.readouterr().err


def test_ranks_that_contradict_the_launcher_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert parse(["--device", "cpu"]).ranks == 4
    with pytest.raises(SystemExit):
        parse(["--device", "cpu", "--ranks", "2"])
    assert "leave --ranks out" in capsys.readouterr().err


def test_sizes() -> None:
    assert [size_in_bytes(text) for text in ("8", "4K", "4k", "2M", "1GiB")] == [8, 4096, 4096, 2 << 20, 1 << 30]
    assert sizes_between(1024, 5000, 2) == (1024, 2048, 4096)
    assert sizes_between(8, 8, 2) == (8,)
    assert sizes_between(8, 10, 1.1) == (8, 9, 10)


def test_options_are_values_or_words() -> None:
    settings: Settings = parse(
        ["decentralized", "--device", "cpu", "-o", "peer_selection_mode=shift_one", "-o", "hierarchical=true"]
    )
    assert settings.options == {"peer_selection_mode": "shift_one", "hierarchical": True}


def test_data_are_the_same_in_pieces_and_differences_are_found() -> None:
    whole = torch.zeros(5000, dtype=torch.int16)
    fill(whole, 3)
    assert torch.equal(whole[1000:2000].long(), values(3, 1000, 2000))
    assert not torch.equal(values(0, 0, 100), values(1, 0, 100))
    assert torch.equal(sums(3, 7, 90), values(0, 7, 90) + values(1, 7, 90) + values(2, 7, 90))
    assert difference(whole, lambda start, stop: values(3, start, stop)) == ""
    whole[4321] += 1
    assert difference(whole, lambda start, stop: values(3, start, stop)).startswith("element 4321 is ")


class _Forgetful(AllReduce):
    def step(self) -> None:
        """Do nothing."""


class _Open(Barrier):
    def step(self) -> None:
        """Let everybody through."""


def _place(count: int = 3000) -> Place:
    assert dist.group.WORLD is not None
    return Place(dist.group.WORLD, torch.device("cpu"), torch.float32, count)


@on_ranks(3)
def test_wrong_results_of_collectives_are_found() -> None:
    for name, kind in COLLECTIVES.items():
        assert kind(_place()).check() == "", name
    assert _Forgetful(_place()).check().startswith("element ")
    # The first to come to a barrier that lets everybody through leaves it before the others have come.
    if dist.get_rank() == 0:
        assert _Open(_place()).check() == "left when 1 of 3 ranks had come"
    dist.barrier()


@on_ranks(3)
def test_wrong_results_of_algorithms_are_found() -> None:
    class Nothing:
        algorithm = "decentralized"

        def stats(self) -> dict[str, Any]:
            return {"wire_bytes": 0}

    def register(ddp: Any, optimizer: Any) -> Any:
        ddp.register_comm_hook(None, noop_hook)
        return Nothing()

    assert "the mean is off by" in TrainingStep(_place(), register).check()
    assert "from their mean" in TrainingStep(_place(), register, "Optimizer").check()
    assert algorithm("bytegrad", {"hierarchical": False})(_place()).check() == ""


def test_a_line_shows_what_is_wrong_and_what_the_other_backend_lacks() -> None:
    times = Times.of([3e-6, 1e-6, 2e-6])
    result = Result("reduce", 4096, "int8", 4096, times, 2e9, 2e9, None, "rank 1: element 0 is 1", None, "no int8")
    text = line(result)
    assert "4 KiB" in text
    assert "1.0       2.0       3.0" in text
    assert "WRONG" in text
    assert "no int8" in text
    assert text.endswith("rank 1: element 0 is 1")


def test_a_line_of_the_table_shows_what_the_kernel_saw() -> None:
    head = header({**_facts(), "hosts": 2}).splitlines()[-1]
    times = Times(0.5, 0.5, 0.5)
    seen = Line(("bbr", "cubic"), 20_000, 30, 0.0625, 0.05)
    one = Result("reduce", 4096, "int8", 4096, times, 2e9, 2e9, None, "", times, None, seen)
    for result, expected in ((one, ["bbr+cubic", "0.150%", "62.50"]), (replace(one, line=Line()), ["-"] * 3)):
        cells = line(result).split()
        assert cells[-5:-2] == expected
        assert head.split()[-7:-3] == ["tcp", "resent", "rtt", "ms"]
    # On one host there is no line.
    assert "rtt" not in header(_facts())
    assert len(line(replace(one, line=None)).split()) == len(line(one).split()) - 3


def _facts() -> dict[str, Any]:
    versions = {"bagua": "1", "torch": "2", "device": "cpu", "network": None, "options": {}, "is_encrypted": False}
    settings = {"model": None, "compute": None, "ranks": 2, "hosts": 1, "vs": "gloo", "iterations": 20, "warmup": 5}
    return {**versions, **settings}


def _result(
    test: str, size: int, median: float, vs: float | None = None, check: str = "", sent: float | None = None
) -> Result:
    other = None if vs is None else Times(vs, vs, vs)
    speed = size / median
    return Result(
        test, size, "float32", size // 4, Times(median, median, median), speed, speed, sent, check, other, None
    )


def test_the_verdict_says_what_was_compared_and_nothing_else() -> None:
    facts = {"vs": "gloo"}
    assert verdict({"vs": None}, [_result("all_reduce", 4096, 1.0), _result("bytegrad", 4096, 1.0)]) == []
    assert verdict(facts, []) == []
    one = [_result("all_reduce", 4096, 2.0, vs=5.0)]
    assert verdict(facts, one) == ["bagua is 2.50 times as fast as gloo at all_reduce of 4 KiB."]
    # What is wrong or has no counterpart is not compared.
    others = [_result("reduce", 8, 1.0, vs=9.0, check="off"), _result("scatter", 8, 1.0)]
    assert verdict(facts, [*one, *others]) == verdict(facts, one)
    faster = [*one, _result("barrier", 0, 1.0, vs=1.5)]
    expected = "bagua is 1.50 to 2.50 times as fast as gloo at what was measured, least at barrier."
    assert verdict(facts, faster) == [expected]
    (sentence,) = verdict(facts, [*faster, _result("broadcast", 1 << 20, 2.0, vs=1.0)])
    assert "0.50 to 2.50 times" in sentence
    assert sentence.endswith(", and slower at broadcast of 1 MiB (0.50).")


def test_the_verdict_names_the_fastest_algorithm_of_each_size() -> None:
    small, large = 4096, 1 << 20
    results = [
        _result("gradient_allreduce", small, 3.0, sent=small),
        _result("gradient_allreduce", large, 3.0, sent=large),
        _result("bytegrad", small, 2.0, sent=small / 4),
        _result("bytegrad", large, 1.03, sent=large / 4),
        # As fast but for the noise: they share the first place.
        _result("powersgd", large, 1.0, sent=large),
        # Does not communicate in every step.
        _result("async", small, 0.1, sent=0),
        _result("async", large, 0.1, sent=0),
    ]
    assert verdict({"vs": None}, results) == [
        "Fastest with messages in every step: bytegrad at 4 KiB; bytegrad and powersgd (full precision) at 1 MiB."
    ]
    assert verdict({"vs": None}, results[:1]) == []
