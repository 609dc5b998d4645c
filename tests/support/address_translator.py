# SPDX-License-Identifier: Apache-2.0
"""A host behind a translator of addresses (NAT), as at home or in a cloud. Needs root, iproute2 and emulated hosts."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from bagua.bench.emulated_hosts import INTERFACE, Host

# The host's own address, which means nothing, or another host, to those outside.
PRIVATE = "192.168.77.2"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_TCP, _FIRST_PORT = 6, 20_000
_SYN, _RST, _ACK = 0x02, 0x04, 0x10
_SOURCE, _DESTINATION, _IP_SUM, _TCP_SUM = 12, 16, 10, 16


class _Flow(NamedTuple):
    own: bytes  # port of the host inside
    peer: bytes  # address and port


@dataclass
class Translator:
    """What it does, which a test may change meanwhile.

    Attributes:
        forgets_after: seconds without a packet after which it no longer knows a connection.
        refuses: it resets what it does not know, and what goes to the private address; else it drops that.
        is_cut: nothing gets through, and nobody is told.
        lets_out: the host inside may open connections.
        opened: how many connections the host inside has opened.
    """

    forgets_after: float = 1e9
    refuses: bool = False
    is_cut: bool = False
    lets_out: bool = True
    opened: int = 0
    _flows: dict[bytes, _Flow] = field(default_factory=dict)  # by the port outside
    _last: dict[bytes, float] = field(default_factory=dict)
    _public: bytes = b""

    def forget(self) -> None:
        """Forget every connection, as after a restart."""
        self._last.clear()

    def _is_known(self, port: bytes) -> bool:
        is_known = time.monotonic() - self._last.get(port, -1e9) < self.forgets_after
        if is_known:
            self._last[port] = time.monotonic()
        return is_known

    def outwards(self, packet: bytearray) -> tuple[bytearray | None, bytearray | None]:
        """Return what goes on to the outside, and what goes back."""
        tcp = 4 * (packet[0] & 15)
        flow = _Flow(bytes(packet[tcp : tcp + 2]), bytes(packet[_DESTINATION:20] + packet[tcp + 2 : tcp + 4]))
        if packet[tcp + 13] & (_SYN | _ACK) == _SYN:
            if not self.lets_out:
                return None, None
            ports = [port for port, known in self._flows.items() if known == flow and self._is_known(port)]
            port = ports[0] if ports else (_FIRST_PORT + len(self._flows)).to_bytes(2, "big")
            if not ports:
                self.opened += 1
            self._flows[port] = flow
            self._last[port] = time.monotonic()
        else:
            ports = [port for port, known in self._flows.items() if known == flow and self._is_known(port)]
            if not ports:
                return None, _reset(packet) if self.refuses else None
            port = ports[0]
        _replace(packet, _SOURCE, self._public, (_IP_SUM, tcp + _TCP_SUM))
        _replace(packet, tcp, port, (tcp + _TCP_SUM,))
        return packet, None

    def inwards(self, packet: bytearray) -> tuple[bytearray | None, bytearray | None]:
        """Return what goes on to the host inside, and what goes back."""
        tcp = 4 * (packet[0] & 15)
        port = bytes(packet[tcp + 2 : tcp + 4])
        flow = self._flows.get(port)
        is_of_it = flow is not None and flow.peer == bytes(packet[_SOURCE:16] + packet[tcp : tcp + 2])
        if flow is None or not is_of_it or packet[_DESTINATION:20] != self._public or not self._is_known(port):
            return None, _reset(packet) if self.refuses else None
        _replace(packet, _DESTINATION, _bytes_of(PRIVATE), (_IP_SUM, tcp + _TCP_SUM))
        _replace(packet, tcp + 2, flow.own, (tcp + _TCP_SUM,))
        return packet, None


@contextmanager
def behind_a_translator(hosts: Sequence[Host]) -> Iterator[tuple[Host, Host, Translator]]:
    """Put the second of two emulated hosts behind a translator, which has the host's address outside."""
    outside, inside = hosts[0], Host(hosts[1].namespace, PRIVATE)
    translator = Translator(_public=_bytes_of(hosts[1].address))
    devices = [_device(f"{host.namespace}n", host) for host in (outside, inside)]
    ended, end = os.pipe()
    thread = threading.Thread(target=_translate, args=(translator, devices, ended))
    thread.start()
    try:
        yield outside, inside, translator
    finally:
        os.close(end)
        thread.join()
        for number in (*devices, ended):
            os.close(number)


def _device(name: str, host: Host) -> int:
    """Replace the host's interface by one whose packets this process reads and writes."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    inside = ["ip", "-n", host.namespace]
    for command in (
        [*inside, "link", "del", INTERFACE],
        ["ip", "link", "set", name, "netns", host.namespace, "name", INTERFACE],
        [*inside, "addr", "add", f"{host.address}/24", "dev", INTERFACE],
        [*inside, "link", "set", INTERFACE, "txqueuelen", "1000", "up"],
        [*inside, "route", "add", "default", "dev", INTERFACE],
    ):
        subprocess.run(command, check=True)
    return device


def _translate(translator: Translator, devices: Sequence[int], ended: int) -> None:
    ways = {devices[0]: (devices[1], translator.inwards), devices[1]: (devices[0], translator.outwards)}
    while True:
        readable, _, _ = select.select([*devices, ended], [], [])
        if ended in readable:
            return
        for device in readable:
            to, translate = ways[device]
            packet = bytearray(os.read(device, 1 << 16))
            if translator.is_cut or packet[0] >> 4 != 4 or packet[9] != _TCP:
                continue
            for way, result in zip((to, device), translate(packet), strict=True):
                if result is not None:
                    os.write(way, result)


def _bytes_of(address: str) -> bytes:
    return bytes(map(int, address.split(".")))


def _folded(total: int) -> int:
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def _sum_of(data: bytes) -> int:
    return sum(struct.unpack(f"!{len(data) // 2}H", data))


def _replace(packet: bytearray, place: int, new: bytes, sums: Sequence[int]) -> None:
    """Overwrite, and correct the checksums at these places (RFC 1624)."""
    end = place + len(new)
    change = len(new) // 2 * 0xFFFF - _sum_of(bytes(packet[place:end])) + _sum_of(new)
    packet[place:end] = new
    for at in sums:
        kept = 0xFFFF - int.from_bytes(packet[at : at + 2], "big")
        packet[at : at + 2] = (0xFFFF - _folded(kept + change)).to_bytes(2, "big")


def _reset(packet: bytearray) -> bytearray | None:
    """Return how whoever does not know the connection answers a packet of it."""
    tcp = 4 * (packet[0] & 15)
    flags = packet[tcp + 13]
    if flags & _RST:
        return None
    source, destination = bytes(packet[_SOURCE:16]), bytes(packet[_DESTINATION:20])
    own, peer = bytes(packet[tcp + 2 : tcp + 4]), bytes(packet[tcp : tcp + 2])
    if flags & _ACK:
        numbers = struct.pack("!IIBB", int.from_bytes(packet[tcp + 8 : tcp + 12], "big"), 0, 5 << 4, _RST)
    else:  # it begins a connection
        after = (int.from_bytes(packet[tcp + 4 : tcp + 8], "big") + 1) & 0xFFFFFFFF
        numbers = struct.pack("!IIBB", 0, after, 5 << 4, _RST | _ACK)
    header = bytearray(struct.pack("!BBHHHBBH", 0x45, 0, 40, 0, 0, 64, _TCP, 0) + destination + source)
    header[_IP_SUM : _IP_SUM + 2] = (0xFFFF - _folded(_sum_of(bytes(header)))).to_bytes(2, "big")
    segment = bytearray(own + peer + numbers + bytes(6))
    total = _folded(_sum_of(destination + source + struct.pack("!HH", _TCP, 20) + segment))
    segment[_TCP_SUM : _TCP_SUM + 2] = (0xFFFF - total).to_bytes(2, "big")
    return header + segment
