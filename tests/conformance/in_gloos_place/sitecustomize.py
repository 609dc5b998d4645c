# SPDX-License-Identifier: Apache-2.0
"""On PYTHONPATH: every process, spawned ranks too, makes a group of "bagua" where it is asked for one of Gloo.

BAGUA_TEST_BACKEND=gloo leaves it to Gloo. BAGUA_TEST_GROUPS names a folder; a process that has made such a group, of
either, leaves a file there, and each that has loaded this a file "loaded".
"""

import functools
import os
from pathlib import Path
from typing import Any

import bagua  # noqa: F401
import torch.distributed as dist
from torch.distributed import distributed_c10d

_make_group = distributed_c10d._new_process_group_helper  # type: ignore[attr-defined]
Path(os.environ["BAGUA_TEST_GROUPS"], "loaded").touch()
_backend = os.environ.get("BAGUA_TEST_BACKEND", "bagua")
# For groups that name no backend.
dist.Backend.default_device_backend_map["cpu"] = _backend


@functools.wraps(_make_group)
def _make_and_note_group(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
    name = str(backend).replace("gloo", _backend)
    if _backend in name or name == "undefined":
        Path(os.environ["BAGUA_TEST_GROUPS"], str(os.getpid())).touch()
        if _backend == "bagua":
            # Options of Gloo's.
            kwargs["backend_options"] = None
    return _make_group(size, rank, ranks, name, *args, **kwargs)


distributed_c10d._new_process_group_helper = _make_and_note_group  # type: ignore[attr-defined]
