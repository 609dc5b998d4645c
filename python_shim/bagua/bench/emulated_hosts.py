# SPDX-License-Identifier: Apache-2.0
"""Hosts made of network namespaces on one machine, with a given line between them. Needs root and iproute2.

With a rate alone every host has a virtual Ethernet link whose rate the kernel limits. With a distance, a buffer or
losses packets go through a program that holds them (emulated_network.cpp) and takes a part of a core for it.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bagua._native import _C
from bagua.info.congestion import available

# A token bucket passes this much at once: 2 ms of a link of 1 Gbit/s, and a packet of loopback size at least.
BURST_SECONDS = 0.002
MINIMUM_BURST = 128 << 10
INTERFACE = "eth0"
_NETWORK = "10.231.7"
_ETHERNET_PACKET = 1500
# `ip netns exec` lays the files of a folder here, of the namespace's name, over those in /etc.
OVERLAYS = Path("/etc/netns")
PROGRAM = Path(_C.__file__).with_name("emulated_network")
_NUMBER = r"(\d+(?:\.\d+)?)"
_RATES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}
_TIMES = {"S": 1.0, "MS": 1e-3, "US": 1e-6}
_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20}


class NoEmulatedHosts(RuntimeError):
    """This machine cannot make them; the message says why."""


@dataclass(frozen=True)
class Network:
    """What lies between hosts.

    Attributes:
        bits_per_second: what a host can send, headers included; 0: as fast as the kernel can.
        round_trip: seconds that a packet and its answer take, as `ping` shows them, half of it each way.
        loss: share of packets that do not arrive, from 0 to 1.
        jitter: seconds that a packet takes longer at most, each way. It changes every so many seconds, and the order
            of packets stays.
        buffer: seconds of packets that wait in front of the line; one that comes when it is full is dropped. inf: they
            wait in the host, and none is dropped.
        packet: bytes of the largest IP packet (MTU).
        congestion: the congestion control that TCP begins with, and others if a process may choose them; none: as the
            kernel has it.
        seed: of the losses. With the same one the same packets of a host are lost.

    Raises:
        ValueError: a buffer in front of a line without a rate, which never fills.
    """

    bits_per_second: float = 0.0
    round_trip: float = 0.0
    loss: float = 0.0
    jitter: float = 0.0
    buffer: float = math.inf
    packet: int = _ETHERNET_PACKET
    congestion: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if math.isfinite(self.buffer) and not self.bits_per_second:
            raise ValueError("a line without a rate has no queue in front of it: give it a rate, or no buffer")

    def __str__(self) -> str:
        rate = f"{self.bits_per_second / 1e6:,g} Mbit/s" if self.bits_per_second else "no limit"
        return ", ".join([rate, f"{1e3 * self.round_trip:g} ms round trip", *self.troubles()])

    def troubles(self) -> list[str]:
        """Return in words what tells the line from one that is only long and narrow."""
        words = [f"{1e3 * self.jitter:g} ms jitter"] if self.jitter else []
        words += [f"{1e3 * self.buffer:g} ms buffer"] if math.isfinite(self.buffer) else []
        words += [f"{100 * self.loss:g} % lost"] if self.loss else []
        words += [f"{self.packet:,}-byte packets"] if self.packet != _ETHERNET_PACKET else []
        words += [" or ".join(self.congestion)] if self.congestion else []
        return words

    @property
    def is_held(self) -> bool:
        """Whether packets go through the program that holds them."""
        return bool(self.round_trip or self.loss or self.jitter) or math.isfinite(self.buffer)


def rate_of(text: str) -> float:
    """Read bits per second: 100M, 1G, 1Gbit; 0 for no limit. ValueError if it is none."""
    match = re.fullmatch(rf"{_NUMBER}([KMG]?)(BIT|BIT/S)?", text.strip().upper())
    if match is None:
        raise ValueError(f"{text!r} is not a rate: write bits per second, such as 100M, 1G or 10G")
    return float(match[1]) * _RATES[match[2]]


def time_of(text: str) -> float:
    """Read seconds: 10ms, 0.05s, 200us. ValueError if it is none."""
    match = re.fullmatch(rf"{_NUMBER}(MS|US|S)", text.strip().upper())
    if match is None:
        raise ValueError(f"{text!r} is not a time: write a number with its unit, such as 10ms or 0.05s")
    return float(match[1]) * _TIMES[match[2]]


def share_of(text: str) -> float:
    """Read a share: 1%, 0.1%. ValueError if it is none, or not below 100 %."""
    match = re.fullmatch(rf"{_NUMBER}\s*%", text.strip())
    if match is None or float(match[1]) >= 100:
        raise ValueError(f"{text!r} is not a share of packets: write a percentage below 100, such as 0.1%")
    return float(match[1]) / 100


def buffer_of(text: str, bits_per_second: float) -> float:
    """Read the seconds that a buffer holds in front of a line of this rate: 50ms, or bytes such as 256K or 2M.

    Raises:
        ValueError: it is none, or there are bytes and no rate.
    """
    match = re.fullmatch(r"(\d+)([KM]?)", text.strip().upper())
    if match is None:
        try:
            return time_of(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a buffer: write a time or bytes, such as 50ms or 256K") from None
    if not bits_per_second:
        raise ValueError(f"a line without a rate has no queue in front of it: {text!r} needs a rate")
    return 8 * int(match[1]) * _SIZES[match[2]] / bits_per_second


def congestion_of(text: str) -> tuple[str, ...]:
    """Read TCP's congestion control, and others that a process may choose: cubic,bbr. ValueError if it is none."""
    names = tuple(text.strip().lower().split(","))
    if not all(re.fullmatch(r"[a-z0-9_-]+", name) for name in names):
        raise ValueError(f"{text!r} is not a congestion control: write its name, such as cubic, or cubic,bbr")
    return names


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoEmulatedHosts(f"'{' '.join(command)}' failed: {done.stderr.strip() or done.stdout.strip()}")


@dataclass(frozen=True)
class Host:
    namespace: str
    address: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs `arguments` on this host."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def environment(self) -> dict[str, str]:
        """Return the environment of a process on this host."""
        # torch warns that addresses have no names, of which there are none.
        quiet = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
        return {**os.environ, **quiet, "BAGUA_HOST_ID": self.namespace, "GLOO_SOCKET_IFNAME": INTERFACE}


@contextmanager
def emulated_hosts(count: int, network: Network | None = None) -> Iterator[list[Host]]:
    """Make `count` hosts, up to 254, of which each reaches each over `network` (None: without limits).

    Raises:
        NoEmulatedHosts: no root, no iproute2, or a kernel without what it takes.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise NoEmulatedHosts("emulated hosts need root and iproute2's ip and tc")
    network = network or Network()
    known = available()
    for name in network.congestion:
        if name not in known:
            raise NoEmulatedHosts(f"this kernel has no congestion control {name!r}, but {', '.join(known)}")
    tag = f"bg{os.getpid() % 100_000}"
    hosts = [Host(f"{tag}h{i}", f"{_NETWORK}.{i + 1}") for i in range(count)]
    connected = _distant if network.is_held else _switched
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
            _name(host, hosts)
        with connected(hosts, tag, network):
            yield hosts
    finally:
        for host in hosts:
            shutil.rmtree(OVERLAYS / host.namespace, ignore_errors=True)
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)


@contextmanager
def _switched(hosts: Sequence[Host], tag: str, network: Network) -> Iterator[None]:
    """Connect hosts to one switch."""
    switch = f"{tag}sw"
    ports = [f"{tag}v{i}" for i in range(len(hosts))]
    try:
        _run("ip", "link", "add", switch, "type", "bridge")
        _run("ip", "link", "set", switch, "up")
        for host, port in zip(hosts, ports, strict=True):
            _run("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", host.namespace)
            _run("ip", "link", "set", port, "master", switch, "up")
            _configure(host, network)
            _limit(host, network.bits_per_second)
        yield
    finally:
        # The kernel takes its time for what goes with a namespace.
        for interface in (*ports, switch):
            subprocess.run(["ip", "link", "del", interface], capture_output=True, check=False)


@contextmanager
def _distant(hosts: Sequence[Host], tag: str, network: Network) -> Iterator[None]:
    """Connect hosts through the program that holds packets."""
    if not PROGRAM.exists():
        raise NoEmulatedHosts(f"{PROGRAM} is missing: this bagua was built without it")
    interfaces = [f"{tag}t{i}" for i in range(len(hosts))]
    settings = (
        network.bits_per_second,
        network.round_trip / 2,
        network.jitter,
        network.buffer,
        network.loss,
        network.seed,
    )
    program = subprocess.Popen(
        [PROGRAM, *map(repr, settings), *interfaces],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout is not None
        assert program.stderr is not None
        if program.stdout.readline() != "ready\n":
            raise NoEmulatedHosts(program.stderr.read().strip())
        for host, interface in zip(hosts, interfaces, strict=True):
            _run("ip", "link", "set", interface, "netns", host.namespace, "name", INTERFACE)
            _configure(host, network)
        yield
    finally:
        # It ends with its input, and takes the interfaces along.
        program.communicate()


def _configure(host: Host, network: Network) -> None:
    inside = ["ip", "-n", host.namespace]
    _run(*inside, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
    _run(*inside, "link", "set", INTERFACE, "mtu", str(network.packet), "txqueuelen", "1000", "up")
    _run(*inside, "link", "set", "lo", "up")
    if not network.congestion:
        return
    # The route says it, as the kernel's own setting knows only what is allowed in the first namespace. One that is
    # locked is also refused to root, who may otherwise choose any.
    lock = ["lock"] if len(network.congestion) == 1 else []
    route = [f"{_NETWORK}.0/24", "dev", INTERFACE, "proto", "kernel", "scope", "link", "src", host.address]
    _run(*inside, "route", "change", *route, "congctl", *lock, network.congestion[0])


def _limit(host: Host, bits_per_second: float) -> None:
    if not bits_per_second:
        return
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
