# SPDX-License-Identifier: Apache-2.0
"""By what members see whether a process lives: a connection that its kernel holds, and a count that it keeps."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import selectors
import socket
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from bagua._native import _C

# Seconds within which a host answers that is there.
_PROBE = 3.0
# Who knocks while the process is stopped, or has no file descriptor left, waits in the kernel.
_BACKLOG = 1024
_MOST_PROBES = 32
# A host that is cut off is noticed after idle + count * interval seconds.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 2, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 4}


class Pulse:
    """A port at which this process is seen to live: connections to it end when the process does, and not before.

    The kernel takes them for a process that is stopped, too. Else the process says its name in them: the port may once
    have been that of another one. The port of a reconfigure handle does not serve: its server does not get over
    connections without a word.
    """

    def __init__(self, handle: str) -> None:
        self._listener = _listen_at(handle.split(":", 4)[4])
        self._listener.setblocking(False)
        # A member's name, from which handle_of and address_of take what they return.
        self.name = f"{self._listener.getsockname()[1]}:{handle}"
        self._held: set[socket.socket] = set()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bagua_pulse", daemon=True)
        self._thread.start()
        _pulses.add(self)

    def stop(self) -> None:
        """Let the others see that this member has gone."""
        self._is_over.set()
        # It wakes the thread.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self.close()

    def close(self) -> None:
        """Close the sockets: in a process that was forked from the member they would outlive it."""
        for held in [self._listener, *self._held]:
            held.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_over.is_set():
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    if key.fileobj is self._listener:
                        self._take(selector)
                    else:
                        # Its other end has gone, or is a stranger's, who talks.
                        selector.unregister(key.fileobj)
                        self._held.discard(key.fileobj)
                        key.fileobj.close()

    def _take(self, selector: selectors.BaseSelector) -> None:
        try:
            with _nobody_forks:
                connection, _ = self._listener.accept()
                _keep_alive(connection)
                self._held.add(connection)
        except BlockingIOError:
            return
        except OSError:
            # The process has no file descriptor left, perhaps for a moment only.
            self._is_over.wait(0.1)
            return
        # There is room for it, or whoever has knocked is not there any more.
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.send(self.name.encode())
        selector.register(connection, selectors.EVENT_READ)


def _listen_at(address: str) -> socket.socket:
    """Listen at the first port of BAGUA_PORT that is free."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    first, last = _C.listening_ports()
    for port in range(first, last + 1):
        try:
            return socket.create_server((address, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    advice = "a process with bagua.elastic takes three: name more ports (also to the firewall)"
    raise OSError(errno.EADDRINUSE, f"none of BAGUA_PORT={first}-{last} is free: {advice}")


def handle_of(member: str) -> str:
    """Return the reconfigure handle in a member's name."""
    return member.partition(":")[2]


def address_of(member: str) -> tuple[str, int]:
    """Return where a member's pulse is felt: an address and a port."""
    port, _, _, _, _, address = member.split(":", 5)
    return address, int(port)


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


_pulses: weakref.WeakSet[Pulse] = weakref.WeakSet()
# A child would keep a connection that is in nobody's list yet.
_nobody_forks = threading.Lock()


def _close_in_child() -> None:
    _nobody_forks.release()
    for pulse in _pulses:
        pulse.close()


os.register_at_fork(before=_nobody_forks.acquire, after_in_parent=_nobody_forks.release, after_in_child=_close_in_child)


class Sign(enum.Enum):
    """What is seen of another process from here."""

    LIVES = "a connection to it stands"
    ENDED = "its host answers, and nobody listens, or another process does"
    SILENT = "nothing answers"


class Feeler:
    """Connections to the pulses of others, made when they are first asked for, and held until it is closed."""

    def __init__(self) -> None:
        self._connections: dict[str, socket.socket] = {}
        self._heard: dict[str, bytes] = {}

    def __enter__(self) -> Feeler:
        return self

    def __exit__(self, *exception: object) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def signs(self, members: Iterable[str]) -> dict[str, Sign]:
        """Return what is seen of each member. A host that does not answer takes seconds, several at once do too."""
        found = {}
        unknown = []
        for member in members:
            sign = self._seen(member) if member in self._connections else None
            if sign is None:
                unknown.append(member)
            else:
                found[member] = sign
        if unknown:
            with ThreadPoolExecutor(min(len(unknown), _MOST_PROBES)) as pool:
                found.update(zip(unknown, pool.map(self._connect, unknown), strict=True))
        return found

    def _seen(self, member: str) -> Sign | None:
        """Return what a connection shows; None where it has ended. A process that is stopped says nothing."""
        name = member.encode()
        try:
            while name.startswith(self._heard[member]):
                said = self._connections[member].recv(len(name))
                if not said:
                    break
                self._heard[member] += said
            else:
                return Sign.ENDED
        except BlockingIOError:
            return Sign.LIVES
        except OSError:
            pass
        self._connections.pop(member).close()
        return None

    def _connect(self, member: str) -> Sign:
        try:
            connection = socket.create_connection(address_of(member), _PROBE)
        except ConnectionRefusedError:
            return Sign.ENDED
        except OSError:
            return Sign.SILENT
        connection.setblocking(False)
        _keep_alive(connection)
        self._connections[member], self._heard[member] = connection, b""
        return Sign.LIVES
