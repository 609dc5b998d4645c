# SPDX-License-Identifier: Apache-2.0
"""NCCL's net plugin between processes, driven as NCCL drives it, without NCCL and without a GPU.

`rank.py` is a process; backend/nccl_net has the tests of what one process can see.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import traffic
from bagua._native import _C
from bagua.bench.emulated_hosts import Host, Network
from plugin import HANDLE_BYTES, REMOTE_ERROR
from script_ranks import free_port
from two_hosts import hosts_over

_PLUGIN = Path(_C.__file__).with_name("libnccl-net-bagua.so")
_SECRET = "a secret of a test, worth nothing"
_SECONDS = 120
_HAS_OPENSSL = _PLUGIN.with_name("libbagua_security.so").exists()
needs_openssl = pytest.mark.skipif(
    not _HAS_OPENSSL, reason="bagua was built without the headers of OpenSSL 3: libssl-dev"
)
plain_and_encrypted = pytest.mark.parametrize(
    "secret", [None, pytest.param(_SECRET, marks=needs_openssl)], ids=["plain", "encrypted"]
)


@contextmanager
def _running(
    folder: Path,
    task: str,
    *options: str,
    size: int = 2,
    env: Sequence[dict[str, str]] = (),
    hosts: Sequence[Host] = (),
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the ranks, each with its own of these environments and on its own of these hosts, if any; kill them."""
    ranks = []
    for number in range(size):
        command = [sys.executable, str(Path(__file__).with_name("rank.py")), str(number), str(size), str(_PLUGIN)]
        command += [str(folder), task, *options]
        base = {key: value for key, value in os.environ.items() if not key.startswith(("BAGUA_", "NCCL_"))}
        own = {"BAGUA_SOCKET_IFNAME": "lo"} if not hosts else hosts[number].environment()
        if hosts:
            command = hosts[number].command(command)
        environment = {**base, **own, **(env[number] if env else {})}
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _said(rank: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what a rank has printed at last."""
    found: dict[str, Any] = json.loads(rank.communicate(timeout=_SECONDS)[0].splitlines()[-1])
    return found


def _run(*task: Any, **settings: Any) -> list[dict[str, Any]]:
    """Run such ranks to their ends; return what each has said."""
    with _running(*task, **settings) as ranks:
        return [_said(rank) for rank in ranks]


def _secrets(*secrets: str | None) -> list[dict[str, str]]:
    return [{"BAGUA_JOB_SECRET": secret} if secret else {} for secret in secrets]


def _is_well(found: dict[str, Any]) -> bool:
    return found["result"] == 0 and not found["warnings"]


@plain_and_encrypted
def test_all_ranks_exchange_over_several_channels(secret: str | None, tmp_path: Path) -> None:
    options = ["--channels", "3", "--rounds", "4"]
    ranks = _run(tmp_path, "exchange", *options, size=3, env=_secrets(*[secret] * 3))
    assert all(_is_well(found) for found in ranks), ranks
    assert [found["messages"] for found in ranks] == [4 * 2 * 3] * 3
    for found in ranks:
        (line,) = found["lines"]
        assert ("encrypted, with the job secret" in line) == (secret is not None)
        assert ("not encrypted" in line) == (secret is None)


@pytest.mark.long
def test_messages_of_up_to_a_gigabyte_go_around_a_ring(tmp_path: Path) -> None:
    ranks = _run(tmp_path, "sizes")
    assert all(_is_well(found) for found in ranks), ranks


def test_a_port_is_enough_for_a_process(tmp_path: Path) -> None:
    """Also where CPU tensors go over the transport as well; and it may connect to itself."""
    ports = _free_ports(2)
    env = [{"BAGUA_PORT": str(port), "BAGUA_HOST_ID": str(port)} for port in ports]
    ranks = _run(tmp_path, "exchange", "--group", env=env)
    assert all(_is_well(found) for found in ranks), ranks
    assert [found["ports"] for found in ranks] == [[port] for port in ports]
    (found,) = _run(tmp_path, "exchange", size=1, env=env)
    assert _is_well(found), found
    assert ports[0] in found["ports"]


def _free_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return sorted(ports)


@pytest.mark.parametrize(
    ("task", "doing"),
    [("wait_for_the_other", "receiving from"), ("send_to_the_other", "sending to")],
    ids=["receiver", "sender"],
)
def test_whoever_speaks_with_a_killed_rank_hears_of_it_at_once(task: str, doing: str, tmp_path: Path) -> None:
    with _running(tmp_path, task) as ranks:
        assert ranks[1].stdout is not None
        assert ranks[1].stdout.readline() == "ready\n"
        time.sleep(0.5)
        ranks[1].send_signal(signal.SIGKILL)
        begin = time.monotonic()
        found = _said(ranks[0])
        assert time.monotonic() - begin < 5
    assert found["result"] == REMOTE_ERROR
    (line,) = found["warnings"]
    assert line.startswith(f"NET/bagua : {doing} 127.0.0.1 port ")


@needs_openssl
def test_a_rank_with_another_secret_or_none_is_not_spoken_with(tmp_path: Path) -> None:
    # Both at once: each waits for seconds whether the other end was a stranger.
    with ExitStack() as stack:
        pairs = []
        for name, theirs in (("another", "another secret, of the same length"), ("none", None)):
            (tmp_path / name).mkdir()
            pairs.append(stack.enter_context(_running(tmp_path / name, "exchange", env=_secrets(_SECRET, theirs))))
        found = [_said(ours) for ours, _ in pairs]
    for one, (_, other) in zip(found, pairs, strict=True):
        # The other one may go on trying: what it finds may be a stranger's.
        assert '"result": 0' not in other.communicate()[0]
        assert one["result"] == REMOTE_ERROR, one
        assert "cannot connect" in one["warnings"][-1], one


@needs_openssl
def test_a_secret_that_cannot_be_used_lets_nobody_connect(tmp_path: Path) -> None:
    """And NCCL is not told that the plugin cannot be used, as it would take its own sockets then."""
    (found, _) = _run(tmp_path, "exchange", "--seconds", "1", env=_secrets("too short", _SECRET))
    assert found["function"].startswith("listen")
    assert "is to have 16 characters or more" in found["warnings"][0]


class _Proxy:
    """Lies on the way to a process, and sees what passes."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.seen = bytearray()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            accepted, _ = self._listening.accept()
            other = socket.create_connection(("127.0.0.1", self._to))
            for one, two in ((accepted, other), (other, accepted)):
                threading.Thread(target=self._pass, args=(one, two), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                self.seen += data
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)


@plain_and_encrypted
def test_a_capture_shows_what_is_sent_only_without_a_secret(secret: str | None, tmp_path: Path) -> None:
    own, changed = tmp_path / "own", tmp_path / "changed"
    own.mkdir()
    changed.mkdir()
    options = ["--handles", str(changed), "--most", str(8 << 20)]
    # A second connection would go to the address that the peer has told, past the capture.
    env = [{**one, "BAGUA_SOCKET_CONNECTIONS": "1"} for one in _secrets(secret, secret)]
    proxies = []
    with _running(own, "stream", *options, env=env) as ranks:
        for name in ("0-1-0", "1-0-0"):
            while not (own / name).exists():
                assert all(rank.poll() is None for rank in ranks)
                time.sleep(0.01)
            # "...@127.0.0.1:PORT", then zeros.
            address, _, port = (own / name).read_bytes().rstrip(b"\0").rpartition(b":")
            proxies.append(_Proxy(int(port)))
            handle = b"%s:%d" % (address, proxies[-1].port)
            (changed / f"{name}.part").write_bytes(handle.ljust(HANDLE_BYTES, b"\0"))
            (changed / f"{name}.part").rename(changed / name)
        found = [_said(rank) for rank in ranks]
    assert all(_is_well(one) for one in found), found
    seen = b"".join(bytes(proxy.seen) for proxy in proxies)
    assert len(seen) >= 8 << 20
    payload = random.Random(0).randbytes(1 << 20)  # that of rank.py
    pieces = [payload[place : place + 16] for place in range(0, len(payload), 1 << 16)]
    assert [piece in seen for piece in pieces] == [secret is None] * len(pieces)


@pytest.mark.long
@plain_and_encrypted
def test_one_channel_carries_more_than_a_plain_connection_over_a_long_line(secret: str | None, tmp_path: Path) -> None:
    size = 256 << 20
    with hosts_over(Network(1e9, 0.05)) as hosts:
        plain = size / traffic.stream(hosts, size)["seconds"]
        options = ["--most", str(2 * size)]
        ranks = _run(tmp_path, "stream", *options, env=_secrets(secret, secret), hosts=hosts)
    assert all(_is_well(found) for found in ranks), ranks
    # A part of the line would say how busy the machine is.
    assert ranks[0]["bytes"] / ranks[0]["seconds"] > 1.2 * plain
