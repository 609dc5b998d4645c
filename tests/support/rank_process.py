# SPDX-License-Identifier: Apache-2.0
"""The inside of one rank: see ranks.py."""

import faulthandler
import functools
import importlib.util
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

# How long ranks wait for each other to make their group.
_MEETING_SECONDS = 60.0


class Settings(NamedTuple):
    rank: int
    world_size: int
    backend: str
    env: Mapping[str, str]
    folder: str
    group_timeout: float
    device: str = "cpu"
    namespace: str = ""  # of the emulated host that it is on


class Reply(NamedTuple):
    rank: int
    when: float  # on the clock that all processes share
    result: Any
    error: str
    exited: bool = False


def output_path(settings: Settings) -> Path:
    return Path(settings.folder, f"output-{settings.rank}.txt")


def main(settings: Settings, connection: Connection) -> None:
    with output_path(settings).open("w") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    if settings.namespace:
        from two_hosts import enter

        enter(settings.namespace)
    os.environ.update(settings.env)
    os.environ.update(RANK=str(settings.rank), LOCAL_RANK=str(settings.rank), WORLD_SIZE=str(settings.world_size))
    started = False
    while request := _next_request(connection):
        function, arguments, timeout = pickle.loads(request)
        # Prints the stack of every thread and ends the process: a hung rank cannot do it any other way.
        faulthandler.dump_traceback_later(timeout, exit=True)
        error, result = "", None
        try:
            if not started:
                _initialise(settings)
                started = True
            _destroy_other_groups()
            result = _call(_find(*function), pickle.loads(arguments), settings.device)
        except BaseException:  # even SystemExit is a failure of the test here
            error = "\n" + traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(pickle.dumps(Reply(settings.rank, time.monotonic(), result, error)))
    if started:
        _destroy()


def _next_request(connection: Connection) -> bytes:
    try:
        return connection.recv_bytes()
    except EOFError:  # the parent is gone
        return b""


def _initialise(settings: Settings) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if settings.device != "cpu":
        torch.cuda.set_device(settings.device)
        torch.set_default_device(settings.device)
    store = dist.FileStore(str(Path(settings.folder, "store")), settings.world_size)  # type: ignore[attr-defined]
    dist.init_process_group(
        settings.backend,
        store=store,
        rank=settings.rank,
        world_size=settings.world_size,
        # On a busy machine not all ranks come in a second: that is not what a short timeout is to measure.
        timeout=timedelta(seconds=max(settings.group_timeout, _MEETING_SECONDS)),
    )
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=settings.group_timeout))


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], device: str) -> Any:
    """What the function returns, for the parent, which knows no device but the CPU."""
    if device == "cpu":
        return function(*arguments)
    from devices import moved

    return moved(function(*moved(arguments, device)), "cpu")


def _destroy_other_groups() -> None:
    """Destroy what earlier tests have left: their threads would slow the next one down.

    Not right after a test: a peer may be in its last operation still.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    for group in list(distributed_c10d._world.pg_map):
        # One may have made another, which ends with it.
        if group is not dist.group.WORLD and group in distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


def _destroy() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@functools.cache
def _find(module_name: str, file: str, qualified_name: str) -> Callable[..., Any]:
    """The function, from the same file as in the parent: pytest's modules need not be importable by name."""
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    function: Any = module
    for part in qualified_name.split("."):
        function = getattr(function, part)
    # Of a test made by on_ranks() a rank runs the body.
    return cast("Callable[..., Any]", getattr(function, "on_each_rank", function))
