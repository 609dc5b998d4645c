# SPDX-License-Identifier: Apache-2.0
"""The short run on a GPU, with CPU tensors: its limits, what it keeps, and that its checks find what is wrong."""

import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import bagua
import checks_hooks
import light_run
import pytest
import torch
import torch.distributed as dist
from check import Check, Wrong
from checks import CHECKS
from light_run import FAIL, OK, SKIP, Program, Run, Stage, failed_before
from ranks import Pools

SCRIPT = Path(__file__).parents[1] / "gpu" / "light.py"


def _says_its_rank() -> str:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return f"sum {tensor.item():.0f}"


def _is_wrong() -> str:
    return Wrong("1 of 1 wrong") if dist.get_rank() == 1 else ""


def _raises() -> None:
    raise ValueError("not so")


def _hangs() -> None:
    if dist.get_rank() == 0:
        time.sleep(600)


def _kills_itself() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _check(function, seconds: float = 15.0, **more: object) -> Check:  # type: ignore[no-untyped-def]
    plain = {"cuda_only": False, "hosts": "", "group_timeout": 0.0, "dying": ()}
    return Check(function.__name__, function, (), (2,), seconds, **{**plain, **more})  # type: ignore[arg-type]


def _run(tmp_path: Path, checks: list[Check], stage: Stage, limit: float = 300.0) -> list[str]:
    run = Run({check.name: check for check in checks}, 1, limit, tmp_path)
    run.stage(stage, [])
    run.close()
    run.pack()
    assert (tmp_path / "results_1.txt").read_text().splitlines() == run.lines
    return [" ".join(line.split(" ")[1:3] + line.split(" ")[4:]) for line in run.lines]


def test_each_check_is_a_line_and_one_that_fails_does_not_keep_the_next_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(light_run, "FACTOR", 1.0)
    monkeypatch.setattr(light_run, "SPAWNED", False)
    checks = [_check(_raises), _check(_is_wrong), _check(_hangs, 3.0), _check(_kills_itself), _check(_says_its_rank)]
    needs_a_gpu = _check(_says_its_rank, cuda_only=True)._replace(name="_on_a_gpu")
    lines = _run(tmp_path, [*checks, needs_a_gpu], Stage("stage", 200, "^_"))
    assert re.fullmatch("_raises FAIL rank .* ValueError: not so", lines[0])
    assert lines[1] == "_is_wrong FAIL 1 of 1 wrong"
    assert re.fullmatch("_hangs FAIL rank 0 .* hung in test_gpu_light.py:[0-9]+ _hangs.*", lines[2])
    assert re.fullmatch("_kills_itself FAIL rank 1 .*-9.*", lines[3])
    assert lines[4:] == ["_says_its_rank ok sum 2", "_on_a_gpu SKIP needs a GPU"]
    with tarfile.open(tmp_path / "gpu_light_1.tar.gz") as archive:
        names = archive.getnames()
    assert {"gpu_light_1/results.txt", "gpu_light_1/logs/stage-_raises.txt"} < set(names)
    assert any(name.endswith("output-1.txt") for name in names)


def test_programs_have_lines_too_and_end_at_the_limit_of_their_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(light_run, "FACTOR", 1.0)
    programs = [
        Program("well", [sys.executable, "-c", "print('figures')"]),
        Program("badly", [sys.executable, "-c", "exit(3)"]),
        Program("missing", ["/no/such/program"]),
        Program("for_ever", [sys.executable, "-c", "import time; time.sleep(600)"]),
    ]
    lines = _run(tmp_path, [_check(_says_its_rank)], Stage("stage", 6, programs=lambda folder: programs))
    assert lines[0] == "well ok figures"
    assert [line.split(" ")[:2] for line in lines[1:]] == [["badly", FAIL], ["missing", FAIL], ["for_ever", FAIL]]


def test_what_had_no_time_is_skipped_and_on_a_gpu_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = {"_says_its_rank": _check(_says_its_rank)}
    run = Run(checks, 1, light_run.END_SECONDS, tmp_path)
    run.stage(Stage("stage", 100, "^_"), [])
    assert run.lines == ["stage _says_its_rank SKIP 0 no time was left"]
    run.counts[OK] = 1
    assert not run.has_failed
    monkeypatch.setattr(light_run, "IS_GPU", True)
    assert run.has_failed
    assert failed_before("\n".join(run.lines))[0] == {"stage _says_its_rank"}


def test_a_way_that_worked_before_is_taken_again() -> None:
    results = ["canary one FAIL 9 no", "canary one ok 9 well NCCL_A=0", "hooks two SKIP 0 no time", "hooks three ok 1"]
    assert failed_before("\n".join(results)) == ({"hooks two"}, {"NCCL_A": "0"})
    assert SKIP in results[2]


def test_no_gpu_is_said_and_is_no_success() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    if "there is no GPU" not in done.stdout:
        pytest.skip("there is a GPU")
    assert done.returncode == 2


# A few of each kind: all of them are a long test.
@pytest.mark.parametrize("name", ["collective.reduce_scatter", "hook.quantized.4bit", "hook.qadam", "hook.local_sgd"])
def test_checks_pass_on_cpu_tensors(rank_pools: Pools, name: str) -> None:
    check = CHECKS[name]
    assert not [words for words in rank_pools[2].run(check.function, *check.arguments) if isinstance(words, Wrong)]


def _take_the_first_ranks(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return dist.broadcast(bucket.buffer(), 0, async_op=True).get_future().then(lambda future: future.value()[0])


def _hooked_wrongly(case: checks_hooks.Case, does_nothing: bool) -> str:
    register = bagua.register_comm_hook

    def wrongly(ddp: Any, *arguments: Any, **options: Any) -> Any:
        if not does_nothing:
            return register(ddp, *arguments, **{**options, "average": False})
        ddp.register_comm_hook(None, _take_the_first_ranks)
        return mock.Mock()

    with mock.patch.object(bagua, "register_comm_hook", wrongly):
        return checks_hooks.follows_its_reference(case)


@pytest.mark.parametrize("does_nothing", [False, True], ids=["wrong_divisor", "no_sum"])
@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad.4bit", "quantized.4bit"])
def test_checks_find_a_hook_that_is_wrong_on_both_devices(rank_pools: Pools, name: str, does_nothing: bool) -> None:
    said = rank_pools[2].run(_hooked_wrongly, checks_hooks.CASES[name], does_nothing)
    assert all(isinstance(words, Wrong) for words in said)
    assert "of the norm" in said[0]


def _light(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--out", str(tmp_path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("piece", ["1", "2"])
def test_all_checks_pass_on_cpu_tensors(tmp_path: Path, piece: str) -> None:
    done = _light(tmp_path, "--piece", piece)
    assert done.returncode == 0, done.stdout[-8000:]
    assert "0 FAIL" in done.stdout
