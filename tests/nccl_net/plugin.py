# SPDX-License-Identifier: Apache-2.0
"""NCCL's side of a net plugin (v11), with memory of the host: what its proxy threads call, by ctypes.

Nothing of torch is imported: a program that has NCCL need not have it in its process either.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HANDLE_BYTES = 128
SUCCESS = 0
REMOTE_ERROR = 6
_WARN = 2
_P = ctypes.c_void_p
_LOGGER = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p
)


def _function(*arguments: Any) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)


class _Net(ctypes.Structure):
    """ncclNet_v11_t; a function that is not called here is a pointer."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("init", _function(_P, ctypes.c_uint64, _P, _LOGGER, _P)),
        ("devices", _P),
        ("getProperties", _P),
        ("listen", _function(_P, ctypes.c_int, _P, _P)),
        ("connect", _function(_P, ctypes.c_int, _P, _P, _P)),
        ("accept", _function(_P, _P, _P)),
        ("regMr", _P),
        ("regMrDmaBuf", _P),
        ("deregMr", _P),
        ("isend", _function(_P, _P, ctypes.c_size_t, ctypes.c_int, _P, _P, _P)),
        ("irecv", _function(_P, ctypes.c_int, _P, _P, _P, _P, _P, _P)),
        ("iflush", _P),
        ("test", _function(_P, _P, _P)),
        ("closeSend", _function(_P)),
        ("closeRecv", _function(_P)),
        ("closeListen", _function(_P)),
        ("getDeviceMr", _P),
        ("irecvConsumed", _P),
        ("makeVDevice", _P),
        ("finalize", _function(_P)),
        ("setNetAttr", _P),
    )


class NetError(Exception):
    """A function of the plugin has returned something else than success.

    Attributes:
        result: what it was, a ncclResult_t.
    """

    def __init__(self, function: str, result: int) -> None:
        super().__init__(f"{function}: {result}")
        self.result = result


class Net:
    """One communicator's view of the plugin.

    Attributes:
        warnings: lines of NCCL's log.
        lines: those that are no warnings.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
        self._net = _Net.in_dll(library, "ncclNetPlugin_v11")
        self.warnings: list[str] = []
        self.lines: list[str] = []
        self._logger = _LOGGER(self._log)
        self._context = ctypes.c_void_p()
        config = ctypes.c_int(-1)
        self._call("init", ctypes.byref(self._context), 1, ctypes.byref(config), self._logger, None)

    def _log(self, level: int, _parts: int, _file: bytes, _line: int, text: bytes, argument: bytes) -> None:
        line = (text % argument).decode()
        (self.warnings if level == _WARN else self.lines).append(line)

    def _call(self, function: str, *arguments: Any) -> None:
        result = getattr(self._net, function)(*arguments)
        if result != SUCCESS:
            raise NetError(function, result)

    def listen(self) -> tuple[bytes, ctypes.c_void_p]:
        handle, listening = ctypes.create_string_buffer(HANDLE_BYTES), ctypes.c_void_p()
        self._call("listen", self._context, 0, handle, ctypes.byref(listening))
        return handle.raw, listening

    def connect(self, handle: bytes) -> ctypes.c_void_p | None:
        sending = ctypes.c_void_p()
        own = ctypes.create_string_buffer(handle, HANDLE_BYTES)
        self._call("connect", self._context, 0, own, ctypes.byref(sending), None)
        return sending if sending else None

    def accept(self, listening: ctypes.c_void_p) -> ctypes.c_void_p | None:
        receiving = ctypes.c_void_p()
        self._call("accept", listening, ctypes.byref(receiving), None)
        return receiving if receiving else None

    def send(self, sending: ctypes.c_void_p, data: Any, size: int, tag: int = 0) -> ctypes.c_void_p:
        request = ctypes.c_void_p()
        self._call("isend", sending, data, size, tag, None, None, ctypes.byref(request))
        return request

    def receive(
        self, receiving: ctypes.c_void_p, places: Sequence[Any], sizes: Sequence[int], tags: Sequence[int]
    ) -> ctypes.c_void_p:
        count = len(places)
        data = (ctypes.c_void_p * count)(*(ctypes.addressof(place) for place in places))
        most, labels = (ctypes.c_size_t * count)(*sizes), (ctypes.c_int * count)(*tags)
        request = ctypes.c_void_p()
        self._call("irecv", receiving, count, data, most, labels, None, None, ctypes.byref(request))
        return request

    def is_done(self, request: ctypes.c_void_p, sizes: Any = None) -> bool:
        done = ctypes.c_int()
        self._call("test", request, ctypes.byref(done), sizes)
        return bool(done.value)

    def wait(self, requests: Iterable[ctypes.c_void_p]) -> None:
        for request in requests:
            while not self.is_done(request):
                time.sleep(0.0001)

    def close(self, senders: Iterable[ctypes.c_void_p], receivers: Iterable[ctypes.c_void_p]) -> None:
        for sending in senders:
            self._call("closeSend", sending)
        for receiving in receivers:
            self._call("closeRecv", receiving)

    def close_listen(self, listening: ctypes.c_void_p) -> None:
        self._call("closeListen", listening)

    def finalize(self) -> None:
        self._call("finalize", self._context)
