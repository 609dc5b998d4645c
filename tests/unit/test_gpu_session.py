# SPDX-License-Identifier: Apache-2.0
"""The script that does on a GPU whatever needs one: pieces, their limits and what is kept of them; without a GPU."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

import gpu_session  # noqa: E402  found by the line above
from gpu_session import Outcome, Piece  # noqa: E402

SCRIPT = ROOT / "scripts" / "gpu_session.py"


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def _run(pieces: list[Piece], folder: Path, budget: float = 600) -> tuple[bool, dict[str, Outcome]]:
    done: dict[str, Outcome] = {}
    return gpu_session.run(pieces, folder, budget, done, lambda: None), done


def test_a_piece_that_fails_does_not_keep_the_next_from_running(tmp_path: Path) -> None:
    is_complete, done = _run([Piece("a", _python("exit(3)")), Piece("b", _python("print('here')"))], tmp_path)
    assert is_complete
    assert (done["a"].outcome, done["a"].exit_code) == ("failed", 3)
    assert done["b"].has_passed
    assert "here" in (tmp_path / "b.log").read_text()


def test_without_a_set_up_nothing_else_runs(tmp_path: Path) -> None:
    _, done = _run([Piece(gpu_session.SET_UP, _python("exit(1)")), Piece("b", _python(""))], tmp_path)
    assert list(done) == [gpu_session.SET_UP]


def test_at_its_limit_a_piece_ends_with_all_of_its_processes(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    child = f"import time, pathlib\nwhile True: pathlib.Path({str(alive)!r}).touch(); time.sleep(0.05)"
    code = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\ntime.sleep(60)"
    outcome = gpu_session.execute(Piece("a", _python(code)), tmp_path / "a.log", 1.5)
    assert (outcome.outcome, outcome.exit_code) == ("ended after 2 s", None)
    assert alive.exists()
    alive.unlink()
    time.sleep(0.5)
    assert not alive.exists()


@pytest.mark.long
def test_tests_of_a_piece_that_was_cut_short_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "test_slow.py"
    file.write_text(
        "import time\ndef test_a(): pass\ndef test_b(): assert 1 == 2, 'not so'\ndef test_c(): time.sleep(60)\n"
    )
    report = tmp_path / "a.xml"
    command = [sys.executable, "-m", "pytest", str(file), "--rootdir", str(tmp_path), "--junitxml", str(report)]
    # pytest needs a while to begin on a busy machine.
    outcome = gpu_session.execute(Piece("a", command, report), tmp_path / "a.log", 30)
    assert not outcome.has_passed
    assert outcome.tests["passed"] == 1
    assert outcome.failed == ["test_slow::test_b: AssertionError: not so"]


def test_what_a_budget_cut_short_or_did_not_reach_is_left_for_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_session, "LEAST_SECONDS", 1)
    pieces = [Piece("a", _python("")), Piece("b", _python("import time; time.sleep(60)")), Piece("c", _python(""))]
    is_complete, done = _run(pieces, tmp_path, 2)
    assert not is_complete
    assert list(done) == ["a"]


def test_no_gpu_is_said_and_is_no_success() -> None:
    if gpu_session.sees_a_gpu():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == gpu_session.NO_GPU
    assert "NOTHING WAS RUN" in done.stdout


def test_every_test_of_both_devices_is_in_a_piece() -> None:
    listed = subprocess.run([sys.executable, str(SCRIPT), "--list"], capture_output=True, text=True, check=True)
    names = listed.stdout.split()
    assert names[0] == gpu_session.SET_UP
    assert len(names) == len(set(names))
    for name in ("gpu_codecs", "gpu_sanitizer-memcheck", "hook_handle", "ddp_hooks", "bench-codec", "torch_suite"):
        assert name in names


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_all_pieces_work_on_cpu_tensors(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--no-set-up", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1700)
    assert done.returncode == 0, done.stdout[-4000:]
    outcomes = json.loads((tmp_path / "session.json").read_text())
    assert all(outcome["outcome"] == "passed" for outcome in outcomes.values())
    assert sum(outcome["tests"].get("passed", 0) for outcome in outcomes.values()) > 50
    assert set(json.loads((tmp_path / "gpu.json").read_text())) == {"codec", "hook", "collectives", "slow-network"}
