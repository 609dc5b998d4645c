# SPDX-License-Identifier: Apache-2.0
"""Every test of PyTorch's own distributed suite that stock Gloo passes also passes on this backend.

On CUDA tensors (BAGUA_TEST_DEVICE=cuda) those that torch has for NCCL, with as many ranks as there are GPUs for: the
suite gives each rank one of its own.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

import pytest
from devices import DEVICE
from expectations import PASSED, SKIPPED, describe_skip, expectation_path, read_expectations
from gpus import gpu_count
from suite_process import RunTest, list_suite, suite_process

pytest.importorskip("expecttest", reason="PyTorch's suite imports expecttest, which is not installed")

WORLD_SIZES = (2, 4)

RunSuiteTest = Callable[[int, str], dict[str, Any]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "suite_test" not in metafunc.fixturenames:
        return
    metafunc.parametrize(("world_size", "suite_test"), _cases_for_gpus() if DEVICE == "cuda" else _cases_for_cpus())


def _cases_for_gpus() -> list[Any]:
    gpus = gpu_count()
    names = list_suite("nccl") if gpus >= min(WORLD_SIZES) else []
    cases = []
    for world_size in WORLD_SIZES:
        if gpus < world_size:
            reason = f"PyTorch's suite gives each of {world_size} ranks a GPU, here are {gpus}"
            cases.append(pytest.param(world_size, "", id=f"{world_size}-nccl", marks=pytest.mark.skip(reason)))
        else:
            cases += [pytest.param(world_size, name, id=f"{world_size}-{name}") for name in names]
    return cases


def _cases_for_cpus() -> list[Any]:
    cases = []
    for world_size in WORLD_SIZES:
        path = expectation_path(version("torch"), world_size)
        if not path.exists():
            reason = f"{path.name} is missing: record what Gloo does with run_torch_suite.py --backend gloo --record"
            cases.append(pytest.param(world_size, "", id=f"{world_size}-unknown", marks=pytest.mark.skip(reason)))
            continue
        for name, expected in read_expectations(path).items():
            marks = [] if expected.outcome == PASSED else [pytest.mark.skip(reason=describe_skip(expected.reason))]
            # The suite with more ranks asks much the same again.
            marks += [pytest.mark.long] * (world_size > min(WORLD_SIZES))
            cases.append(pytest.param(world_size, name, id=f"{world_size}-{name}", marks=marks))
    return cases


@pytest.fixture(scope="module")
def run_suite_test(request: pytest.FixtureRequest) -> Iterator[RunSuiteTest]:
    backend = request.config.getoption("--backend")
    suite = "nccl" if DEVICE == "cuda" else "gloo"
    suites: dict[int, RunTest] = {}
    with ExitStack() as stack:

        def run(world_size: int, test: str) -> dict[str, Any]:
            if world_size not in suites:
                suites[world_size] = stack.enter_context(suite_process(backend, world_size, suite))
            return suites[world_size](test)

        yield run


@pytest.mark.any_device
def test_torch_suite(
    run_suite_test: RunSuiteTest,
    world_size: int,
    suite_test: str,
    record_property: Callable[[str, object], None],
) -> None:
    record_property("torch suite ranks", world_size)  # counted in the summary
    result = run_suite_test(world_size, suite_test)
    if DEVICE == "cuda" and result["outcome"] == SKIPPED:
        pytest.skip(f"torch skips it: {result['reason']}")
    assert result["outcome"] == PASSED, f"{result['outcome']}: {result['reason']}\n{result['output']}"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("NoRanks", "not every rank entered the test"),
        ("LastRankDies", "exit codes [0, 3]"),
        ("LastRankRaises", "ValueError: planted"),
    ],
)
def test_broken_suite_is_noticed(run_suite_test: RunSuiteTest, broken: str, message: str) -> None:
    result = run_suite_test(2, f"{broken}.test_get_rank")
    assert result["outcome"] == "fail"
    assert message in result["reason"]
