# SPDX-License-Identifier: Apache-2.0
"""Resets the TCP connections of this process, as a firewall or a dying switch does: both ends see ECONNRESET."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
# A socket that is connected to AF_UNSPEC is disconnected, at once, with a reset to the other end.
_NOBODY = socket.AF_UNSPEC.to_bytes(2, "little") + bytes(14)


# Longer than a thread that others keep from running stays in a call of the kernel.
_PATIENCE_SECONDS = 10.0


def _disconnect(connection: socket.socket) -> None:
    end = time.monotonic() + _PATIENCE_SECONDS
    while _libc.connect(connection.fileno(), _NOBODY, len(_NOBODY)) != 0:
        code = ctypes.get_errno()
        # A thread is just about to leave the socket.
        if code != errno.EBUSY or time.monotonic() > end:
            raise OSError(code, os.strerror(code))
        time.sleep(0.001)
    # A reset that comes from the network lets the own end read the end of the stream, too. Without, that end waits on,
    # and for ever where the reset overtakes data on its way, which makes the other end take it for forged.
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        if error.errno != errno.ENOTCONN:  # says so, and does it
            raise


def reset_connections(is_chosen: Callable[[int, int], bool]) -> int:
    """Reset those that `is_chosen` by their own port and the port of their peer. Return how many these were."""
    count = 0
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            # A descriptor of our own, which the owner of the other cannot close in between.
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                    continue
                own, peer = connection.getsockname()[1], connection.getpeername()[1]
                if is_chosen(own, peer):
                    _disconnect(connection)
                    count += 1
        except FileNotFoundError:
            continue  # closed while this loop ran
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.ENOTCONN):  # closed likewise; one that listens
                raise
    return count
