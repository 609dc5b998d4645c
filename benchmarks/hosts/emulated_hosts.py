# SPDX-License-Identifier: Apache-2.0
"""Hosts made of network namespaces on one machine, each behind a link of a given speed. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# A token bucket passes this much at once: 2 ms of a link of 1 Gbit/s, and a packet of loopback size at least.
BURST_SECONDS = 0.002
MINIMUM_BURST = 128 << 10
INTERFACE = "eth0"
# `ip netns exec` lays the files of a folder here, of the namespace's name, over those in /etc.
OVERLAYS = Path("/etc/netns")


class NoEmulatedHosts(RuntimeError):
    """This machine cannot make them; the message says why."""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoEmulatedHosts(f"'{' '.join(command)}' failed: {done.stderr.strip() or done.stdout.strip()}")


@dataclass(frozen=True)
class Host:
    """One emulated host."""

    namespace: str
    address: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs `arguments` on this host."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def environment(self) -> dict[str, str]:
        """Return the environment of a process on this host."""
        return {**os.environ, "BAGUA_HOST_ID": self.namespace, "GLOO_SOCKET_IFNAME": INTERFACE}


@contextmanager
def emulated_hosts(count: int, bits_per_second: float | None) -> Iterator[list[Host]]:
    """Make `count` hosts on one switch; each sends at most `bits_per_second` (None: as fast as the kernel can).

    Raises:
        NoEmulatedHosts: no root, no iproute2, or a kernel without what it takes.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise NoEmulatedHosts("emulated hosts need root and iproute2's ip and tc")
    tag = f"bg{os.getpid() % 100_000}"
    hosts = [Host(f"{tag}h{i}", f"10.231.7.{i + 1}") for i in range(count)]
    switch = f"{tag}sw"
    try:
        _run("ip", "link", "add", switch, "type", "bridge")
        _run("ip", "link", "set", switch, "up")
        for i, host in enumerate(hosts):
            _attach(host, f"{tag}v{i}", switch, bits_per_second)
            _name(host, hosts)
        yield hosts
    finally:
        for i, host in enumerate(hosts):
            shutil.rmtree(OVERLAYS / host.namespace, ignore_errors=True)
            # The kernel takes its time for what goes with a namespace.
            subprocess.run(["ip", "link", "del", f"{tag}v{i}"], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", switch], capture_output=True, check=False)


def _attach(host: Host, port: str, switch: str, bits_per_second: float | None) -> None:
    inside = ["ip", "-n", host.namespace]
    _run("ip", "netns", "add", host.namespace)
    _run("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", host.namespace)
    _run("ip", "link", "set", port, "master", switch, "up")
    _run(*inside, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
    _run(*inside, "link", "set", INTERFACE, "up")
    _run(*inside, "link", "set", "lo", "up")
    if bits_per_second is not None:
        burst = max(int(bits_per_second / 8 * BURST_SECONDS), MINIMUM_BURST)
        limit = ["rate", f"{int(bits_per_second)}bit", "burst", f"{burst}b", "latency", "50ms"]
        _run("tc", "-n", host.namespace, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limit)


def _name(host: Host, hosts: Sequence[Host]) -> None:
    """Let names be found: the machine's own means this host here. Without, each look-up waits for a distant server."""
    folder = OVERLAYS / host.namespace
    folder.mkdir(parents=True, exist_ok=True)
    names = ["127.0.0.1 localhost", f"{host.address} {socket.gethostname()}"]
    names += [f"{other.address} {other.namespace}" for other in hosts]
    (folder / "hosts").write_text("\n".join(names) + "\n")
    (folder / "resolv.conf").write_text("")
