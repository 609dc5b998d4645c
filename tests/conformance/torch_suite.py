# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own distributed tests as a test case that really starts its ranks.

Reads BACKEND, WORLD_SIZE and SUITE from the environment, so that a spawned rank builds the same class as its parent.
"""

import json
import logging
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # by the parent once: DistributedDataParallel and the optimizers would import it in every rank
import torch.distributed as dist
import torch.distributed.tensor

BACKEND = os.environ["BACKEND"]
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
SUITE = os.environ["SUITE"]

# Many tests are gated on the literal names "gloo" and "nccl" while the module is imported. Importing it under one of
# these selects the tests that Gloo or NCCL has to pass; the ranks then initialise the backend under test instead.
# INIT_METHOD selects the tests that initialise a group again (they need a file); a rank sets the true path.
with mock.patch.dict(os.environ, BACKEND=SUITE, INIT_METHOD="file:///unused"):
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

if BACKEND == "bagua":
    import bagua  # noqa: F401  registers the backend once, before ranks are forked

distributed_test.BACKEND = BACKEND
for _backends in (
    distributed_test.PROFILING_SUPPORTED_BACKENDS,
    distributed_test.CUDA_PROFILING_SUPPORTED_BACKENDS,
    distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
):
    _backends.append(BACKEND)
for _feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
    common_distributed.DistTestCases.backend_feature[_feature].add(BACKEND)

# Until torch 2.13 dist.monitored_barrier() asks for the name "gloo" before it calls the group, which has the operation.
_monitored_barrier = dist.monitored_barrier


def _monitored_barrier_of_any_name(*args: Any, **kwargs: Any) -> None:
    with mock.patch.object(dist.Backend, "GLOO", BACKEND):
        _monitored_barrier(*args, **kwargs)


dist.monitored_barrier = _monitored_barrier_of_any_name

logging.getLogger(common_distributed.__name__).setLevel(logging.WARNING)  # it reports every rank it starts

# The slowest test takes a fraction of this on two cores; torch's own limit of 300 s makes every hang cost five minutes.
common_distributed.TIMEOUT_DEFAULT = 100


class _Impatient:
    """The module `time` for torch's loops that wait for ranks: a tenth of a second a turn would be most of a test."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        time.sleep(0.005 if seconds == 0.1 else seconds)


common_distributed.time = distributed_test.time = _Impatient()

_RanksTestCase: Any = distributed_test.TestDistBackend


def _start_method() -> str:
    # A forked rank saves the two seconds of importing torch, but cannot use CUDA if the parent has asked for devices.
    return "spawn" if torch.cuda.is_available() else "fork"


class TorchSuite(_RanksTestCase, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
    """One instance per test: the parent starts the ranks, and each rank runs the test's body."""

    def setUp(self) -> None:
        super().setUp()
        self.start_ranks()

    def start_ranks(self) -> None:
        method = _start_method()
        if method == "fork" and (threads := len(os.listdir("/proc/self/task"))) != 1:
            raise RuntimeError(f"cannot fork ranks: the parent has {threads} threads, whose locks a child may inherit")
        context: Any = multiprocessing.get_context(method)
        self._start_processes(context.Process)

    def tearDown(self) -> None:
        processes = list(self.processes)
        super().tearDown()
        for process in processes:
            process.join()
        self.check_ranks_ran([process.exitcode for process in processes])

    def check_ranks_ran(self, exit_codes: list[int | None]) -> None:
        """torch accepts a test without ranks, and looks at the exit code of rank 0 only."""
        paths = [self._report(rank) for rank in range(WORLD_SIZE)]
        reports = [json.loads(path.read_text()) for path in paths if path.exists()]
        expected = [{"rank": rank, "world_size": WORLD_SIZE, "backend": BACKEND} for rank in range(WORLD_SIZE)]
        assert reports == expected, f"not every rank entered the test with the backend under test, but only {reports}"
        test = getattr(type(self), self._current_test_name())
        if getattr(test, "__wrapped__", test) not in [getattr(f, "__func__", f) for f in self.skip_return_code_checks]:
            assert len(set(exit_codes)) == 1, f"ranks ended differently: exit codes {exit_codes}"

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        """Runs in a rank, after the process group was initialised."""
        report = {"rank": self.rank, "world_size": dist.get_world_size(), "backend": dist.get_backend()}
        self._report(self.rank).write_text(json.dumps(report))
        distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]
        super().run_test(test_name, parent_pipe)

    def _report(self, rank: int) -> Path:
        return Path(f"{self.file_name}.rank{rank}")

    def _test_accumulate_gradients_no_sync(self, *args: Any, **kwargs: Any) -> None:
        # Builds its model only for the names "gloo", "mpi" and "nccl", and asks for the name when it runs.
        with mock.patch.object(distributed_test, "BACKEND", SUITE):
            super()._test_accumulate_gradients_no_sync(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _test_ddp_logging_data(self, is_gpu: bool) -> Any:
        # torch logs the name of every backend that is not its own as "custom"; the test asks for dist.get_backend().
        model = super()._test_ddp_logging_data(is_gpu)  # type: ignore[no-untyped-call]
        logging_data = model._get_ddp_logging_data
        names = {"custom": BACKEND}
        model._get_ddp_logging_data = lambda: {
            key: names.get(value, value) if key == "backend_name" else value for key, value in logging_data().items()
        }
        return model
