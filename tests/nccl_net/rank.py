# SPDX-License-Identifier: Apache-2.0
"""A rank of a test: connects to all others through the plugin, does what is asked for, and prints what it saw as JSON.

Handles travel through files of a folder, as they do over NCCL's bootstrap.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from plugin import Net, NetError

# What NCCL has under way of a channel with its buffers of 4 MiB: so many messages of so many bytes.
WINDOW = 4
MESSAGE = 1 << 20


class _Rank:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.net = Net(options.plugin)
        self.senders: dict[tuple[int, int], ctypes.c_void_p] = {}
        self.receivers: dict[tuple[int, int], ctypes.c_void_p] = {}

    def connect(self) -> None:
        """Connect to every other rank, with so many channels in each direction."""
        options = self.options
        # A rank that is alone connects to itself.
        peers = [peer for peer in range(options.size) if peer != options.rank or options.size == 1]
        listeners = {}
        for peer in peers:
            for channel in range(options.channels):
                handle, listeners[peer, channel] = self.net.listen()
                path = options.folder / f"{peer}-{options.rank}-{channel}"
                path.with_suffix(".part").write_bytes(handle)
                path.with_suffix(".part").rename(path)
        handles: dict[tuple[int, int], bytes] = {}
        end = time.monotonic() + options.seconds
        while len(self.senders) + len(self.receivers) < 2 * len(listeners):
            for key, listening in listeners.items():
                path = options.handles / f"{options.rank}-{key[0]}-{key[1]}"
                if key not in handles and path.exists():
                    handles[key] = path.read_bytes()
                if key in handles and key not in self.senders and (sending := self.net.connect(handles[key])):
                    self.senders[key] = sending
                if key not in self.receivers and (receiving := self.net.accept(listening)):
                    self.receivers[key] = receiving
            if time.monotonic() > end:
                raise TimeoutError("not connected")
            time.sleep(0.0005)
        for listening in listeners.values():
            self.net.close_listen(listening)

    def close(self) -> None:
        self.net.close(self.senders.values(), self.receivers.values())
        self.net.finalize()

    # --- What a rank may be asked for --------------------------------------------------------------------------------

    def exchange(self) -> dict[str, Any]:
        """All to all, on all channels at once, several times: messages of any size, the same on both ends."""
        most = self.options.most
        places = {key: ctypes.create_string_buffer(most) for key in self.receivers}
        for number in range(self.options.rounds):
            requests, sent, sizes = {}, {}, {}
            for key, receiving in self.receivers.items():
                requests[key] = self.net.receive(receiving, [places[key]], [most], [key[0]])
            for key, sending in self.senders.items():
                sent[key] = _payload(most, self.options.rank, *key, number)
                sizes[key] = self.net.send(sending, sent[key], len(sent[key]), self.options.rank)
            for key, request in requests.items():
                size = ctypes.c_int()
                while not self.net.is_done(request, ctypes.byref(size)):
                    time.sleep(0.0001)
                expected = _payload(most, key[0], self.options.rank, key[1], number)
                if places[key].raw[: size.value] != expected:
                    raise AssertionError(f"{size.value} bytes of rank {key[0]} are not the {len(expected)} sent")
            self.net.wait(sizes.values())
        return {"messages": self.options.rounds * len(self.receivers)}

    def sizes(self) -> dict[str, Any]:
        """Around a ring, messages from 0 bytes to a gigabyte: what has come is sent on until it is back."""
        rank, size = self.options.rank, self.options.size
        sending, receiving = self.senders[(rank + 1) % size, 0], self.receivers[(rank - 1) % size, 0]
        for bytes_ in (0, 1, 4 << 10, 1 << 20, 64 << 20, 1 << 30):
            data, place = _numbered_blocks(bytes_, rank), bytearray(bytes_)
            sent_digest = hashlib.sha256(data).digest()
            for _ in range(size):
                came = ctypes.c_int(-1)
                request = self.net.receive(receiving, [_memory_of(place)], [bytes_], [0])
                sent = self.net.send(sending, _memory_of(data), bytes_)
                while not self.net.is_done(request, ctypes.byref(came)):
                    time.sleep(0.0001)
                self.net.wait([sent])
                if came.value != bytes_:
                    raise AssertionError(f"{came.value} bytes have come instead of {bytes_}")
                data, place = place, data
            if hashlib.sha256(data).digest() != sent_digest:
                raise AssertionError(f"{bytes_} bytes have changed on their way")
        return {}

    def stream(self) -> dict[str, Any]:
        """From rank 0 to rank 1 on one channel, with what NCCL has under way.

        Returns the seconds until the receiver has it all, and those of the last half.
        """
        count = self.options.most // MESSAGE
        is_sender = self.options.rank == 0
        other = 1 - self.options.rank
        buffers = [ctypes.create_string_buffer(random.Random(i).randbytes(MESSAGE), MESSAGE) for i in range(WINDOW)]
        begin = half = time.monotonic()
        requests: list[ctypes.c_void_p] = []
        for number in range(count):
            if number == count // 2:
                half = time.monotonic()
            if len(requests) == WINDOW:
                self.net.wait([requests.pop(0)])
            buffer = buffers[number % WINDOW]
            if is_sender:
                requests.append(self.net.send(self.senders[other, 0], buffer, MESSAGE))
            else:
                requests.append(self.net.receive(self.receivers[other, 0], [buffer], [MESSAGE], [0]))
        self.net.wait(requests)
        # The sender is told that the receiver has it.
        word = ctypes.create_string_buffer(1)
        if is_sender:
            self.net.wait([self.net.receive(self.receivers[other, 0], [word], [1], [0])])
        else:
            self.net.wait([self.net.send(self.senders[other, 0], word, 1)])
        end = time.monotonic()
        return {"bytes": count * MESSAGE, "seconds": end - begin, "last_half": end - half}

    def wait_for_the_other(self) -> dict[str, Any]:
        """Rank 0 waits for rank 1, which says that it is there and does nothing more."""
        self._say_that_it_is_there()
        place = ctypes.create_string_buffer(1)
        self.net.wait([self.net.receive(self.receivers[1, 0], [place], [1], [0])])
        return {}

    def send_to_the_other(self) -> dict[str, Any]:
        """Rank 0 sends to rank 1, which says that it is there and does nothing more."""
        self._say_that_it_is_there()
        byte = ctypes.create_string_buffer(1)
        while True:
            self.net.wait([self.net.send(self.senders[1, 0], byte, 1)])
            time.sleep(0.001)

    def _say_that_it_is_there(self) -> None:
        if self.options.rank == 1:
            print("ready", flush=True)
            time.sleep(self.options.seconds)


def _numbered_blocks(size: int, rank: int) -> bytearray:
    """Random bytes, no two MiB of which are the same."""
    block = random.Random(rank).randbytes(1 << 20)
    data = bytearray(block * (size >> 20)) + block[: size & ((1 << 20) - 1)]
    for begin in range(0, size - 7, 1 << 20):
        data[begin : begin + 8] = begin.to_bytes(8, "little")
    return data


def _memory_of(data: bytearray) -> Any:
    return (ctypes.c_char * len(data)).from_buffer(data)


def _payload(most: int, *seed: int) -> bytes:
    source = random.Random(repr(seed))
    return source.randbytes(source.choice([0, 1, 8, 4096, most // 2, most]))


def _join_group(options: argparse.Namespace) -> None:
    """Sum over all ranks with backend bagua, and so have its transport listen."""
    import bagua  # noqa: F401
    import torch
    import torch.distributed as dist

    store = dist.FileStore(str(options.folder / "store"), options.size)
    dist.init_process_group("bagua", store=store, rank=options.rank, world_size=options.size)
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    assert tensor.eq(options.size).all()


def _listening_ports() -> list[int]:
    """Return the ports at which this process listens over IPv4."""
    sockets = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            sockets.add(os.readlink(entry))
    listens = "0A"
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == listens and f"socket:[{row[9]}]" in sockets]


def _main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("rank", "size"):
        parser.add_argument(name, type=int)
    for name in ("plugin", "folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("task")
    parser.add_argument("--handles", type=Path, help="where those of the others are, if not in FOLDER")
    parser.add_argument("--group", action="store_true", help="be a rank of a process group of CPU tensors as well")
    for name, default in (("channels", 1), ("rounds", 3), ("most", 300_000), ("seconds", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    options.handles = options.handles or options.folder
    if options.group:
        _join_group(options)
    rank = _Rank(options)
    found: dict[str, Any] = {"result": 0}
    try:
        rank.connect()
        found.update(getattr(rank, options.task)())
        rank.close()
    except NetError as error:
        found.update(result=error.result, function=str(error))
    except TimeoutError as error:
        found.update(result=-1, function=str(error))
    found.update(warnings=rank.net.warnings, lines=rank.net.lines, ports=_listening_ports())
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    _main()
