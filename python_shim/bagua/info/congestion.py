# SPDX-License-Identifier: Apache-2.0
"""TCP's congestion control on this machine: which one is used, which a process may choose, and how to allow BBR."""

from __future__ import annotations

import socket
from pathlib import Path

_SETTINGS = Path("/proc/sys/net/ipv4")
BBR = "bbr"


def in_use() -> str:
    """Return the congestion control that a new connection has."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def _listed(name: str) -> list[str]:
    """Return what the kernel lists, which before 5.7 it does in the first network namespace only: in no container."""
    try:
        return (_SETTINGS / name).read_text().split()
    except FileNotFoundError:
        return []


def available() -> list[str]:
    """Return those that the kernel has loaded; where it does not say, those of which one can be chosen perhaps."""
    return _listed("tcp_available_congestion_control") or list(dict.fromkeys([in_use(), BBR]))


def allowed() -> list[str]:
    """Return those that this process may choose for a connection: root may choose any that is loaded."""
    return [name for name in available() if _may_choose(name)]


def _may_choose(name: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        try:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError:  # not permitted, or not loaded
            return False
    return True


def commands_for_bbr() -> list[str]:
    """Return what an administrator types so that every process may choose BBR."""
    names = _listed("tcp_allowed_congestion_control") or [in_use()]
    return [
        "modprobe tcp_bbr",
        f'sysctl -w net.ipv4.tcp_allowed_congestion_control="{" ".join(dict.fromkeys([*names, BBR]))}"',
    ]
