# SPDX-License-Identifier: Apache-2.0
"""On PYTHONPATH: every process, spawned ranks too, makes a group of "bagua" where it is asked for one of Gloo.

BAGUA_TEST_BACKEND=gloo leaves it to Gloo. BAGUA_TEST_GROUPS names a folder; a process that has made such a group, of
either, leaves a file there, and each that has loaded this a file "loaded".

Ranks are forked where torch's tests spawn them: importing torch and the test in every rank would be most of the time.
"""

import functools
import multiprocessing
import os
from pathlib import Path
from typing import Any

import bagua  # noqa: F401
import torch.multiprocessing
from torch.distributed import distributed_c10d

_make_group = distributed_c10d._new_process_group_helper  # type: ignore[attr-defined]
Path(os.environ["BAGUA_TEST_GROUPS"], "loaded").touch()
_backend = os.environ.get("BAGUA_TEST_BACKEND", "bagua")


@functools.wraps(_make_group)
def _make_and_note_group(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
    # A group that names no backend gets torch's for the device. torch's table of these stays as it is: tests read it.
    name = "cpu:gloo" if str(backend) == "undefined" else str(backend)
    name = name.replace("gloo", _backend)
    if _backend in name:
        Path(os.environ["BAGUA_TEST_GROUPS"], str(os.getpid())).touch()
        if _backend == "bagua":
            # Options of Gloo's.
            kwargs["backend_options"] = None
    return _make_group(size, rank, ranks, name, *args, **kwargs)


distributed_c10d._new_process_group_helper = _make_and_note_group  # type: ignore[attr-defined]

_get_context = multiprocessing.get_context


def _get_forking_context(method: str | None = None) -> Any:
    return _get_context("fork" if method == "spawn" else method)


torch.multiprocessing.get_context = _get_forking_context
