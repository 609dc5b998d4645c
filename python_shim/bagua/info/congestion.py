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


def available() -> list[str]:
    """Return those that the kernel has loaded."""
    return (_SETTINGS / "tcp_available_congestion_control").read_text().split()


def allowed() -> list[str]:
    """Return those that this process may choose for a connection: root may choose any that is loaded."""
    return [name for name in available() if _may_choose(name)]


def _may_choose(name: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        try:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except PermissionError:
            return False
    return True


def commands_for_bbr() -> list[str]:
    """Return what an administrator types so that every process may choose BBR."""
    names = (_SETTINGS / "tcp_allowed_congestion_control").read_text().split()
    return [
        "modprobe tcp_bbr",
        f'sysctl -w net.ipv4.tcp_allowed_congestion_control="{" ".join(dict.fromkeys([*names, BBR]))}"',
    ]
