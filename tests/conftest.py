# SPDX-License-Identifier: Apache-2.0
"""Options and fixtures shared by all Python tests."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from ranks import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        default="bagua",
        help="backend of the tests with ranks; gloo tells a wrong test from a wrong backend",
    )


@pytest.fixture(scope="session", autouse=True)
def _flight_recorder_files_are_temporary() -> Iterator[None]:
    """Let groups that fail on purpose leave nothing in the home directory. Before the server of ranks is started."""
    with tempfile.TemporaryDirectory(prefix="traces-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FR_DUMP_TEMP_FILE", os.path.join(folder, "trace_"))
        yield


@pytest.fixture(scope="session")
def rank_pools(request: pytest.FixtureRequest) -> Iterator[dict[int, RankPool]]:
    with ExitStack() as stack:
        yield {
            size: stack.enter_context(RankPool(size, request.config.getoption("--backend"))) for size in (1, 2, 3, 4)
        }


@pytest.fixture(params=(1, 2, 3, 4), ids="{}-ranks".format)
def ranks(request: pytest.FixtureRequest, rank_pools: dict[int, RankPool]) -> RankPool:
    """Runs the test with one to four ranks, which the tests of a session share: leave their process group usable."""
    return rank_pools[request.param]


@pytest.fixture(params=(2, 3, 4), ids="{}-ranks".format)
def peers(request: pytest.FixtureRequest, rank_pools: dict[int, RankPool]) -> RankPool:
    """As `ranks`, for tests that need at least two."""
    return rank_pools[request.param]
