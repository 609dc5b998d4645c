# SPDX-License-Identifier: Apache-2.0
"""`python -m bagua.bench plan`: shapes from where the user has them, and the predictions that were published."""

import itertools
import json
import re
import runpy
import sys
from pathlib import Path

import bagua
import pytest
import torch
from bagua._message_bytes import Parameter
from bagua.bench import plan, processor
from bagua.bench.cost_model import WAYS, Line
from bagua.bench.shapes import MODELS, from_file, from_script
from bagua.info import congestion

ROOT = Path(__file__).parents[2]
_LINE = ["--rate", "1G", "--delay", "10ms", "--processor", "1"]


def test_well_known_models_have_as_many_parameters_as_everywhere() -> None:
    counts = {name: sum(p.elements for p in shapes()) for name, shapes in MODELS.items()}
    assert counts == {"gpt2": 124_439_808, "resnet50": 25_557_032}


def test_shapes_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "sizes"
    file.write_text("# mine\n\nembed 50x8\n8x4\nbias 4\n")
    expected = [
        Parameter("embed", (50, 8), "embedding"),
        Parameter("parameter4", (8, 4)),
        Parameter("bias", (4,)),
    ]
    assert from_file(file) == expected
    file.write_text("8 by 4\n8xx4\n")
    with pytest.raises(ValueError, match="line 2"):
        from_file(file)


def test_a_script_tells_its_shapes_and_the_seconds_of_a_step() -> None:
    arguments = list(sys.argv)
    parameters, seconds = from_script(str(ROOT / "examples" / "ddp.py"), [])
    assert [(p.shape, p.role) for p in parameters] == [
        ((512, 64), ""),
        ((512,), ""),
        ((10, 512), "head"),
        ((10,), "head"),
    ]
    assert 0 < seconds < 1
    assert sys.argv == arguments


def test_a_script_imports_what_lies_beside_it_and_is_alone_under_torchrun_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    (tmp_path / "beside_the_script.py").write_text((ROOT / "examples" / "ddp.py").read_text())
    script = tmp_path / "train.py"
    script.write_text("import beside_the_script")
    assert len(from_script(str(script), [])[0]) == 4


def test_a_script_without_steps_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("")
    with pytest.raises(RuntimeError, match="after 0 steps"):
        from_script(str(script), [])


def _alone(folder: Path, steps: int, status: int) -> list[Parameter]:
    """The shapes of a script that makes no DDP, and has frozen layers."""
    script = folder / "alone.py"
    script.write_text(f"""
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(9, 9).requires_grad_(False), torch.nn.Linear(9, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range({steps}):
    optimizer.zero_grad()
    model(torch.ones(1, 9)).sum().backward()
    optimizer.step()
sys.exit({status})
""")
    return from_script(str(script), [])[0]


def test_of_a_script_without_ddp_frozen_parameters_are_left_out(tmp_path: Path) -> None:
    assert [parameter.shape for parameter in _alone(tmp_path, 20, 0)] == [(2, 9), (2,)]


def test_a_script_may_end_by_exit(tmp_path: Path) -> None:
    assert len(_alone(tmp_path, 6, 0)) == 2
    for steps, status, problem in ((2, 0, "after 2 steps"), (6, 3, "ended with 3")):
        with pytest.raises(RuntimeError, match=problem):
            _alone(tmp_path, steps, status)


def test_every_algorithm_is_foretold_with_lines_that_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--model", "gpt2", "--compute", "80ms", *_LINE]) == 0
    text = capsys.readouterr().out
    names = set(re.findall(r'register_comm_hook\(model, "(\w+)"', text))
    assert names == set(bagua.available_algorithms())
    for line in text.splitlines():
        if line.startswith("bagua.register"):
            compile(line, "pasted", "eval")


@pytest.mark.parametrize(("hosts", "is_said"), [(2, False), (4, True)])
def test_a_plan_for_more_than_two_hosts_says_how_far_off_it_may_be(hosts: int, is_said: bool) -> None:
    text = plan.table(MODELS["resnet50"](), 0.2, Line(hosts, 1e9, 0.0), "resnet50")
    assert ("up to 24 % too short" in text) == is_said


def test_several_numbers_of_hosts_make_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--model", "resnet50", "--compute", "80ms", *_LINE, "--hosts", "8", "64", "1024"]) == 0
    _, _, _, head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["hosts", "8", "64", "1,024"]
    steps = {line[:30].strip(): [float(cell.replace(",", "")) for cell in line[30:].split()] for line in lines}
    assert {len(cells) for cells in steps.values()} == {3}
    assert [WAYS["bytegrad"].more_delays(hosts) for hosts in (8, 9)] == [0, 1]
    # A ring passes through all hosts, one after another.
    assert steps["DDP over Gloo"][2] > 5 * steps["DDP over Gloo"][1]
    assert steps["bytegrad"][2] < 2 * steps["bytegrad"][0]


def test_a_slower_line_makes_every_step_longer_that_communicates() -> None:
    model = MODELS["resnet50"]()
    fast, slow = (
        {row.way: row.seconds for row in plan.rows(model, 0.2, Line(2, rate, delay))}
        for rate, delay in ((1e9, 0.0), (1e8, 0.05))
    )
    assert all(slow[way] > fast[way] for way in fast.keys() - {"async", "diloco"})
    assert 5 < slow["gloo"] / fast["gloo"] < 15


def test_losses_cost_time_but_with_bbr(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(*words: str) -> dict[str, float]:
        given = ["--model", "resnet50", "--compute", "200ms", "--rate", "1G", "--delay", "50ms", "--processor", "1"]
        assert plan.main([*given, "--json", *words]) == 0
        return {row["way"]: row["seconds"] for row in json.loads(capsys.readouterr().out)}

    cubic, lossy = planned("--congestion", "cubic"), planned("--congestion", "cubic", "--loss", "0.1%")
    bbr = planned("--congestion", "bbr")
    assert planned("--congestion", "bbr", "--loss", "0.1%") == bbr
    # One connection has 10 Mbit/s for 102 MB, and 32 have 320.
    assert lossy["gloo"] > 50 * bbr["gloo"]
    assert bbr["gradient_allreduce"] < cubic["gradient_allreduce"] < lossy["gradient_allreduce"] < 4
    assert bbr["bytegrad"] < cubic["bytegrad"] < lossy["bytegrad"] < lossy["gradient_allreduce"]
    assert cubic["local_sgd"] < lossy["local_sgd"]
    # Where BBR is allowed, losses bring it to our connections and not to Gloo's.
    monkeypatch.setattr(congestion, "in_use", lambda: "cubic")
    monkeypatch.setattr(congestion, "allowed", lambda: ["cubic", "bbr"])
    assert planned("--loss", "0.1%") == bbr | {way: lossy[way] for way in ("gloo", "gloo, fp16 hook")}


def test_a_slower_processor_is_measured_or_given_and_its_work_takes_longer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--model", "resnet50", "--compute", "200ms", "--rate", "10G", "--json"]
    monkeypatch.setattr(processor, "_measured", lambda: {name: 3 * us for name, us in processor._MICROSECONDS.items()})
    plans = []
    for given in (["--processor", "1"], []):
        assert plan.main([*arguments, *given]) == 0
        plans.append({row["way"]: row for row in json.loads(capsys.readouterr().out)})
    of_prices, measured = plans
    assert measured["bytegrad"]["processor"] == pytest.approx(3)
    # 2 ns for each of 25.6 million parameters, and messages.
    more = measured["bytegrad"]["seconds"] - of_prices["bytegrad"]["seconds"]
    assert 2 * 2e-9 * 25.6e6 < more < 2.2 * 2e-9 * 25.6e6
    assert measured["async"]["seconds"] == of_prices["async"]["seconds"]


def test_what_the_processor_does_is_timed_on_one_core_and_threads_are_as_before() -> None:
    threads = torch.get_num_threads()
    least = processor._measured()
    assert least.keys() == processor._MICROSECONDS.keys()
    assert all(1 < microseconds < 1e6 for microseconds in least.values())
    assert torch.get_num_threads() == threads


def test_what_is_unknown_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for given, asked in (
        (["--model", "gpt2", "--compute", "1s"], "--rate"),
        (["--model", "gpt2", *_LINE], "--compute"),
        (["--model", "gpt2", "--compute", "0ms", *_LINE], "the time of a step without communication, such as 80ms"),
        (["--model", "gpt2", "--compute", "1s", "--rate", "1G", "--processor", "0"], "1 is that of the prices"),
    ):
        with pytest.raises(SystemExit):
            plan.main(given)
        assert asked in capsys.readouterr().err


def test_published_errors_are_those_of_the_prices_in_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "hosts"))
    model = runpy.run_path(str(ROOT / "benchmarks" / "hosts" / "cost_model.py"))
    results = ROOT / "benchmarks" / "results"
    grid, *others = (model["load"](results / f"{name}.json") for name in ("grid", "hosts", "grid_cubic", "grid_loss"))
    shapes = {scenario.model: model["_model"](scenario.model) for runs in others for scenario, _ in runs}
    prices = {way: plan.Price(**price) for way, price in json.loads(plan.PRICES.read_text()).items()}
    published = (results / "prediction.md").read_text()
    assert re.findall(r"\d+ of \d+", Path(plan.__file__).read_text()) == re.findall(r"\d+ of \d+(?= pred)", published)
    reference = model["seconds_alone"](grid)
    for (way, price), runs in itertools.product(prices.items(), others):
        for sample in model["samples_of"](way, runs, shapes, reference):
            error = 100 * sample.error(way, price)
            assert f"{error:+.0f} ({1e3 * sample.seconds:.0f} ms, n={sample.steps})" in published, sample.scenario
