# SPDX-License-Identifier: Apache-2.0
"""What the environment says of this process. Values are read at each call.

The autotune getters are there for code that reads them: no autotune service stands behind them, and their values
change nothing.

Definition: Bagua 0.9.
"""

from __future__ import annotations

import os
import socket

_TORCHELASTIC = ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def get_world_size() -> int:
    """Number of processes: WORLD_SIZE, by default 1."""
    return _integer("WORLD_SIZE", 1)


def get_rank() -> int:
    """Global rank of this process: RANK, by default 0."""
    return _integer("RANK", 0)


def get_local_rank() -> int:
    """Rank of this process on its host: LOCAL_RANK, by default 0."""
    return _integer("LOCAL_RANK", 0)


def get_local_size() -> int:
    """Number of processes on this host: LOCAL_WORLD_SIZE, by default 1."""
    return _integer("LOCAL_WORLD_SIZE", 1)


def get_node_rank() -> int:
    """Number of this host: GROUP_RANK where torchrun started the process, else NODE_RANK, by default 0.

    No communication uses it: which ranks share a host is found, see `BaguaProcessGroup`.
    """
    if all(name in os.environ for name in _TORCHELASTIC):
        return _integer("GROUP_RANK", 0)
    return _integer("NODE_RANK", 0)


def get_default_bucket_size() -> int:
    """Bytes after which a bucket is closed: BAGUA_DEFAULT_BUCKET_SIZE, by default 10 MiB."""
    return _integer("BAGUA_DEFAULT_BUCKET_SIZE", 10 * 1024**2)


def get_master_addr() -> str:
    """Address where ranks meet: MASTER_ADDR, by default 127.0.0.1."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def get_bagua_service_port() -> int:
    """Port of the original's autotune service: BAGUA_SERVICE_PORT, by default -1. Nothing listens there."""
    return _integer("BAGUA_SERVICE_PORT", -1)


def is_report_metrics_switch_on() -> bool:
    """True if BAGUA_REPORT_METRICS is 1. No metrics are reported."""
    return _integer("BAGUA_REPORT_METRICS", 0) == 1


def get_autotune_level() -> int:
    """BAGUA_AUTOTUNE, by default 0. Nothing is tuned, whatever the level."""
    return _integer("BAGUA_AUTOTUNE", 0)


def get_autotune_max_samples() -> int:
    """BAGUA_AUTOTUNE_MAX_SAMPLES, by default 60. Unused."""
    return _integer("BAGUA_AUTOTUNE_MAX_SAMPLES", 60)


def get_autotune_sampling_confidence_time_s() -> float:
    """BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S in seconds, by default 5.0. Unused."""
    return _seconds("BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S", 5.0)


def get_autotune_warmup_time_s() -> float:
    """BAGUA_AUTOTUNE_WARMUP_TIME_S in seconds, by default 30.0. Unused."""
    return _seconds("BAGUA_AUTOTUNE_WARMUP_TIME_S", 30.0)


def get_is_output_autotune_log() -> bool:
    """True if BAGUA_IS_OUTPUT_AUTOTUNE_LOG is set and not 0. No log is written."""
    return os.environ.get("BAGUA_IS_OUTPUT_AUTOTUNE_LOG", "0") not in ("", "0")


def get_autotune_server_wait_time() -> int:
    """BAGUA_AUTOTUNE_SERVER_WAIT_TIME in seconds, by default 300. Nothing waits."""
    return _integer("BAGUA_AUTOTUNE_SERVER_WAIT_TIME", 300)


def find_free_network_port() -> int:
    """Return a TCP port of this host that was free a moment ago.

    >>> 0 < find_free_network_port() < 65536
    True
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _integer(name: str, default: int) -> int:
    return int(_number(name, default, int))


def _seconds(name: str, default: float) -> float:
    return float(_number(name, default, float))


def _number(name: str, default: float, kind: type) -> float:
    text = os.environ.get(name)
    if not text:
        return default
    try:
        value: float = kind(text)
    except ValueError:
        raise ValueError(f"environment variable {name} is to be a number, got {text!r}") from None
    return value
