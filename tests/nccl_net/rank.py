# SPDX-License-Identifier: Apache-2.0
"""A rank of a test: connects to all others through the plugin, does what is asked for, and prints what it saw as JSON.

Handles travel through files of a folder, as they do over NCCL's bootstrap.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import time
from collections.abc import Callable
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
        peers = [peer for peer in range(options.size) if peer != options.rank]
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
                sent[key] = payload(most, self.options.rank, *key, number)
                sizes[key] = self.net.send(sending, sent[key], len(sent[key]), self.options.rank)
            for key, request in requests.items():
                size = ctypes.c_int()
                while not self.net.is_done(request, ctypes.byref(size)):
                    time.sleep(0.0001)
                expected = payload(most, key[0], self.options.rank, key[1], number)
                if places[key].raw[: size.value] != expected:
                    raise AssertionError(f"{size.value} bytes of rank {key[0]} are not the {len(expected)} sent")
            self.net.wait(sizes.values())
        return {"messages": self.options.rounds * len(self.receivers)}

    def ring(self) -> dict[str, Any]:
        """A sum of all ranks' vectors of 64-bit numbers: a reduce-scatter and an all-gather around the ring."""
        rank, size = self.options.rank, self.options.size
        following, previous = (rank + 1) % size, (rank - 1) % size
        count = self.options.most // 8 // size
        numbers = [[(rank + 1) * (part * count + i) for i in range(count)] for part in range(size)]
        for step in range(2 * (size - 1)):
            is_sum = step < size - 1
            outgoing = (rank - step) % size
            incoming = (outgoing - 1) % size
            data, place = (ctypes.c_int64 * count)(*numbers[outgoing]), (ctypes.c_int64 * count)()
            receiving = self.net.receive(self.receivers[previous, 0], [place], [8 * count], [0])
            sending = self.net.send(self.senders[following, 0], data, 8 * count)
            self.net.wait([receiving, sending])
            added = numbers[incoming] if is_sum else [0] * count
            numbers[incoming] = [a + b for a, b in zip(place, added, strict=True)]
        total = size * (size + 1) // 2
        if numbers != [[total * (part * count + i) for i in range(count)] for part in range(size)]:
            raise AssertionError("the sum is wrong")
        return {"numbers": size * count}

    def stream(self) -> dict[str, Any]:
        """From rank 0 to rank 1 on one channel, with what NCCL has under way; seconds until the receiver has it all."""
        count = self.options.most // MESSAGE
        is_sender = self.options.rank == 0
        other = 1 - self.options.rank
        buffers = [ctypes.create_string_buffer(random.Random(i).randbytes(MESSAGE), MESSAGE) for i in range(WINDOW)]
        begin = time.monotonic()
        requests: list[ctypes.c_void_p] = []
        for number in range(count):
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
        return {"bytes": count * MESSAGE, "seconds": time.monotonic() - begin}

    def die(self) -> dict[str, Any]:
        """Rank 0 waits for rank 1, which says that it is there and does nothing more."""
        if self.options.rank == 1:
            print("ready", flush=True)
            time.sleep(self.options.seconds)
        place = ctypes.create_string_buffer(1)
        self.net.wait([self.net.receive(self.receivers[1, 0], [place], [1], [0])])
        return {}


def payload(most: int, *seed: int) -> bytes:
    source = random.Random(repr(seed))
    return source.randbytes(source.choice([0, 1, 8, 4096, most // 2, most]))


def _main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("rank", "size"):
        parser.add_argument(name, type=int)
    for name in ("plugin", "folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("task")
    parser.add_argument("--handles", type=Path, help="where those of the others are, if not in FOLDER")
    for name, default in (("channels", 1), ("rounds", 3), ("most", 300_000), ("seconds", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    options.handles = options.handles or options.folder
    rank = _Rank(options)
    task: Callable[[], dict[str, Any]] = getattr(rank, options.task)
    found: dict[str, Any] = {"result": 0}
    try:
        rank.connect()
        found.update(task())
        rank.close()
    except NetError as error:
        found.update(result=error.result, function=str(error))
    except TimeoutError as error:
        found.update(result=-1, function=str(error))
    print(json.dumps({**found, "warnings": rank.net.warnings, "lines": rank.net.lines}), flush=True)


if __name__ == "__main__":
    _main()
