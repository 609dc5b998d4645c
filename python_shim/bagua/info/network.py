# SPDX-License-Identifier: Apache-2.0
"""The machine's network interfaces, and which of them carries data."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct

from bagua._native import _C

_SIOCGIFADDR = 0x8915
_IFREQ = 40
_LOOPBACK = "127."


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack(f"{_IFREQ}s", name.encode()))
            try:
                fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(request.tobytes()[20:24])
    return found


def listening_address() -> tuple[str, str]:
    """Return the address where bagua listens to other hosts, and why.

    Raises:
        ValueError: a setting names an interface that has none.
    """
    for name in ("BAGUA_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if os.environ.get(name):
            return _C.local_address(), f"{name}={os.environ[name]}"
    master = os.environ.get("MASTER_ADDR")
    return _C.local_address(), f"from which MASTER_ADDR={master} is reached" if master else "MASTER_ADDR is not set"


def is_loopback(address: str) -> bool:
    """Whether other machines cannot reach it."""
    return address.startswith(_LOOPBACK) or address == "::1"


def outward() -> list[str]:
    """Return the names of interfaces that lead to other machines."""
    return [name for name, address in interfaces().items() if not is_loopback(address)]
