# SPDX-License-Identifier: Apache-2.0
"""Plain sockets between emulated hosts, without torch: what a line does to packets, and to one connection of TCP."""

import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the program is to start quickly
    from bagua.bench.emulated_hosts import Host

PORT = 4711
# A receiver of datagrams ends when it has heard nothing for so long.
_SILENCE = 0.5
_SECONDS = 120
_HEADER = struct.Struct("=Id")
# Places in the kernel's struct tcp_info, each of 32 bits.
_TCP_INFO = {"round_trip_us": 68, "retransmitted": 100, "least_round_trip_us": 148, "segments": 156}


def stream(hosts: "Sequence[Host]", size: int, congestion: str = "") -> dict[str, Any]:
    """Send `size` bytes from the first host to the second over one connection, with this congestion control if given.

    Returns what the sender saw: seconds until all had arrived, what the kernel counted, and "refused" where the
    congestion control was not allowed.
    """
    return _between(hosts, ["receive_stream"], ["send_stream", hosts[1].address, str(size), congestion])[0]


def datagrams(hosts: "Sequence[Host]", count: int, size: int, pause: float = 0.0) -> list[tuple[int, float]]:
    """Send `count` datagrams of `size` bytes, headers included, with a pause before each.

    Returns the number and the delay in seconds of each that came, in the order of their arrival.
    """
    sender = ["send_datagrams", hosts[1].address, str(count), str(size), str(pause)]
    return [(number, delay) for number, delay in _between(hosts, ["receive_datagrams"], sender)[1]]


def _between(hosts: "Sequence[Host]", receiver: list[str], sender: list[str]) -> tuple[Any, Any]:
    """Return what the sender on the first host and the receiver on the second have printed."""
    programs = []
    try:
        for host, role in ((hosts[1], receiver), (hosts[0], sender)):
            command = [*host.command([sys.executable, __file__]), *role]
            programs.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            if role is receiver:
                assert programs[0].stdout is not None
                assert programs[0].stdout.readline() == "ready\n"
        received, sent = (json.loads(program.communicate(timeout=_SECONDS)[0]) for program in programs)
    finally:
        for program in programs:
            program.kill()
    return sent, received


def _receive_stream() -> Any:
    with socket.create_server(("", PORT)) as listening:
        print("ready", flush=True)
        connection, _ = listening.accept()
        with connection:
            while connection.recv(1 << 20):
                pass
            connection.sendall(b"!")
    return None


def _send_stream(address: str, size: str, congestion: str) -> Any:
    with socket.create_connection((address, PORT), timeout=_SECONDS) as connection:
        if congestion:
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
            except PermissionError:
                return {"refused": congestion}
        begin = time.monotonic()
        connection.sendall(bytes(int(size)))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        seconds = time.monotonic() - begin
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
    counted = {key: struct.unpack_from("=I", info, place)[0] for key, place in _TCP_INFO.items()}
    return {"seconds": seconds, "congestion": name, **counted}


def _receive_datagrams() -> Any:
    came = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiving:
        receiving.bind(("", PORT))
        print("ready", flush=True)
        receiving.settimeout(_SECONDS)
        while True:
            try:
                number, sent = _HEADER.unpack_from(receiving.recv(1 << 16))
            except TimeoutError:
                return came
            came.append((number, time.monotonic() - sent))
            receiving.settimeout(_SILENCE)


def _send_datagrams(address: str, count: str, size: str, pause: str) -> Any:
    of_headers = 28
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
        sending.connect((address, PORT))
        for number in range(int(count)):
            time.sleep(float(pause))
            sending.send(_HEADER.pack(number, time.monotonic()).ljust(int(size) - of_headers, b"\0"))
    return None


_ROLES: dict[str, Callable[..., Any]] = {
    "receive_stream": _receive_stream,
    "send_stream": _send_stream,
    "receive_datagrams": _receive_datagrams,
    "send_datagrams": _send_datagrams,
}

if __name__ == "__main__":
    print(json.dumps(_ROLES[sys.argv[1]](*sys.argv[2:])))
