# SPDX-License-Identifier: Apache-2.0
"""What scripts/sum_reports.py counts."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "sum_reports.py"

CTEST = """<testsuite>
<testcase name="codec_test" classname="codec_test" time="2" status="run"/>
<testcase name="torn_test" classname="torn_test" time="1" status="fail"><failure message="SEGFAULT"/></testcase>
<testcase name="wrong_test" classname="wrong_test" time="1" status="fail"><failure message="Failed"/></testcase>
<testcase name="fuzz_corpus.health" classname="fuzz_corpus.health" time="1" status="run"/>
</testsuite>"""
CODEC = """<testsuites><testsuite>
<testcase name="One" status="run" result="completed" time="0.5" classname="Codec"/>
<testcase name="Two" status="run" result="completed" time="1.5" classname="Codec"/>
<testcase name="OnGpu" status="run" result="skipped" time="0" classname="Codec"><skipped message=""/></testcase>
<testcase name="DISABLED_Three" status="notrun" result="suppressed" time="0" classname="Codec"/>
</testsuite></testsuites>"""
WRONG = """<testsuites><testsuite>
<testcase name="Right" status="run" result="completed" time="0" classname="Wrong"/>
<testcase name="Wrong" status="run" result="completed" time="0" classname="Wrong"><failure message=""/></testcase>
</testsuite></testsuites>"""
PYTEST = """<testsuites><testsuite>
<testcase classname="tests.unit.test_info" name="test_help" time="0.25"/>
<testcase classname="tests.unit.test_info" name="test_gpu" time="0"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def _sum(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True)


def _write(folder: Path, **reports: str) -> Path:
    for name, text in reports.items():
        path = folder / ("units" if name.endswith("_test") else "") / f"{name}.xml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_an_executable_counts_by_its_tests_and_once_where_it_breaks_off(tmp_path: Path) -> None:
    done = _sum(_write(tmp_path, ctest=CTEST, codec_test=CODEC, wrong_test=WRONG))
    # Passed: two of the codec, one of wrong_test, the corpus. Failed: one of wrong_test, and what broke off.
    assert done.stdout == "4 passed, 2 failed, 2 skipped\n"
    assert done.returncode == 1


def test_an_executable_that_nobody_built_has_failed(tmp_path: Path) -> None:
    case = '<testcase name="many_ranks" status="notrun"><skipped message="Unable to find executable"/></testcase>'
    done = _sum(_write(tmp_path, ctest=f"<testsuite>{case}</testsuite>", pytest=PYTEST))
    assert done.stdout == "1 passed, 1 failed, 1 skipped\n"
    assert done.returncode == 1


def test_several_runs_are_one_sum_with_the_times_of_each(tmp_path: Path) -> None:
    first, second = _write(tmp_path / "first", pytest=PYTEST), _write(tmp_path / "second", codec_test=CODEC)
    (first / "steps.txt").write_text("90 set-up\n12 C++ units\n")
    ctest = CTEST.splitlines()
    (second / "ctest.xml").write_text("\n".join([ctest[0], ctest[1], ctest[-1]]))
    done = _sum("--times", first, second)
    assert "     90  set-up\n     12  C++ units\n" in done.stdout
    assert "    0.2  tests/unit\n" in done.stdout
    assert "    2.0  C++ units\n" in done.stdout
    assert done.stdout.endswith("3 passed, 0 failed, 3 skipped\n")
    assert done.returncode == 0


def test_nothing_that_passed_is_a_failure(tmp_path: Path) -> None:
    done = _sum(tmp_path)
    assert done.stdout == "0 passed, 0 failed, 0 skipped\n"
    assert done.returncode == 1
