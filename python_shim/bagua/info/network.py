# SPDX-License-Identifier: Apache-2.0
"""The machine's network interfaces, and which of them carries data."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct

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


def gloo_address() -> tuple[str, str]:
    """Return the address that Gloo listens on, and why: what torch's createDefaultDevice does."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if chosen:
        known = interfaces()
        addresses = [known.get(name, "none") for name in chosen.split(",")]
        return ", ".join(addresses), f"GLOO_SOCKET_IFNAME={chosen}"
    name = socket.gethostname()
    try:
        candidates = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        candidates = []
    for family, kind, protocol, _, address in candidates:
        with socket.socket(family, kind, protocol) as listener:
            try:
                listener.bind((address[0], 0))
            except OSError:  # an address of another machine
                continue
            return str(address[0]), f"what the host name '{name}' resolves to"
    return "127.0.0.1", f"the host name '{name}' does not resolve to an address of this machine"


def is_loopback(address: str) -> bool:
    """Whether other machines cannot reach it."""
    return address.startswith(_LOOPBACK) or address == "::1"


def outward() -> list[str]:
    """Return the names of interfaces that lead to other machines."""
    return [name for name, address in interfaces().items() if not is_loopback(address)]
