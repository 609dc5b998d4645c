# SPDX-License-Identifier: Apache-2.0
"""Options and fixtures shared by all Python tests."""

import faulthandler
import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from typing import TextIO

import gpus
import pytest
from devices import DEVICE
from ranks import POOLS, RankPool

_ERRORS = pytest.StashKey[TextIO]()


def _name(pool: tuple[int, bool]) -> str:
    return f"{pool[0]}-ranks" + ("-sharing" if pool[1] else "")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        default="bagua",
        help="backend of the tests with ranks; gloo tells a wrong test from a wrong backend",
    )


def pytest_report_header() -> list[str]:
    if "BAGUA_TEST_DEVICE" not in os.environ:
        return ["tests/gpu: not collected, no GPU is asked for (make test-gpu)"]
    if DEVICE == "cpu":
        return ["device cpu"]
    return ["device cuda: only tests marked any_device, and tests/gpu"] + [
        gpus.placement_here(size, share=share).how for size, share in POOLS
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if DEVICE == "cpu":
        return
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("any_device") is None])
    items[:] = [item for item in items if item.get_closest_marker("any_device") is not None]
    for item in items:
        if marker := item.get_closest_marker("cpu_only"):
            item.add_marker(pytest.mark.skip(reason=f"not on CUDA tensors: {marker.args[0]}"))


class _FailuresAtOnce:
    """Names what fails when it does: pytest's summary is lost where a later test never ends."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            reporter.line(f"\nFAILED {report.nodeid} ({report.when})")


def pytest_configure(config: pytest.Config) -> None:
    # Later what is printed is taken from the tests.
    config.stash[_ERRORS] = os.fdopen(os.dup(2), "w")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FailuresAtOnce(config))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """End a process whose test does not let go. After a failure pytest-timeout does not watch a teardown any more."""
    faulthandler.dump_traceback_later(300, exit=True, file=item.config.stash[_ERRORS])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session", autouse=True)
def _flight_recorder_files_are_temporary() -> Iterator[None]:
    """Let groups that fail on purpose leave nothing in the home directory. Before the server of ranks is started."""
    with tempfile.TemporaryDirectory(prefix="traces-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FR_DUMP_TEMP_FILE", os.path.join(folder, "trace_"))
        yield


@pytest.fixture(scope="session")
def all_pools(request: pytest.FixtureRequest) -> Iterator[dict[tuple[int, bool], RankPool]]:
    backend = request.config.getoption("--backend")
    with ExitStack() as stack:
        yield {(size, share): stack.enter_context(RankPool(size, backend, share_gpu=share)) for size, share in POOLS}


@pytest.fixture(scope="session")
def rank_pools(all_pools: dict[tuple[int, bool], RankPool]) -> dict[int, RankPool]:
    return {size: pool for (size, share), pool in all_pools.items() if not share}


@pytest.fixture(params=POOLS, ids=_name)
def ranks(request: pytest.FixtureRequest, all_pools: dict[tuple[int, bool], RankPool]) -> RankPool:
    """Runs the test with one to four ranks, which the tests of a session share: leave their process group usable."""
    return all_pools[request.param]


@pytest.fixture(params=POOLS[1:], ids=_name)
def peers(request: pytest.FixtureRequest, all_pools: dict[tuple[int, bool], RankPool]) -> RankPool:
    """As `ranks`, for tests that need at least two."""
    return all_pools[request.param]
