# SPDX-License-Identifier: Apache-2.0
"""Emulated hosts for a test, and what a training over two of them has to have done.

The ranks of the training (`several_hosts/train_script.py`) write down what they have seen.
"""

import ctypes
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from bagua.bench.emulated_hosts import INTERFACE, OVERLAYS, Host, Network, NoEmulatedHosts, emulated_hosts

SCRIPT = Path(__file__).parents[1] / "several_hosts" / "train_script.py"
STEPS = 20
_NEW_MOUNTS, _NETWORK = 0x00020000, 0x40000000
_BIND, _PRIVATE_TREE = 0x1000, 0x44000
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def hosts_over(network: Network | None = None, count: int = 2) -> Iterator[list[Host]]:
    """Make hosts with this line between them; skips the test on a machine that cannot make them."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(emulated_hosts(count, network))
        except NoEmulatedHosts as error:
            pytest.skip(f"no emulated hosts on this machine: {error}")
        yield hosts


def enter(namespace: str) -> None:
    """Move this process, which has one thread, onto an emulated host, as `ip netns exec` does."""
    with open(f"/var/run/netns/{namespace}") as network:
        _check(_libc.setns(network.fileno(), _NETWORK))
    _check(_libc.unshare(_NEW_MOUNTS))
    _check(_libc.mount(b"none", b"/", None, _PRIVATE_TREE, None))
    for file in (OVERLAYS / namespace).iterdir():
        _check(_libc.mount(bytes(file), f"/etc/{file.name}".encode(), None, _BIND, None))


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def set_link(host: Host, state: str) -> None:
    """Take a host's network away, or give it back: "down" or "up"."""
    subprocess.run(["ip", "-n", host.namespace, "link", "set", INTERFACE, state], check=True)


def results_of(folder: Path) -> list[dict[str, Any]]:
    """Return what each rank saw, by rank."""
    results = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    return sorted(results, key=lambda result: int(result["rank"]))


def check_two_hosts(results: list[dict[str, Any]], ranks_per_host: int) -> None:
    """Check that all ranks trained as one, and that bagua carried 8-bit gradients between the hosts."""
    assert [result["rank"] for result in results] == list(range(2 * ranks_per_host))
    assert all(result["weights"] == results[0]["weights"] for result in results)
    for result in results:
        assert sum(result["losses"][-5:]) < 0.85 * sum(result["losses"][:5])
    # Two hosts: every parameter leaves each of them twice by half, in one byte; 128 of them share a scale of two.
    parameters = results[0]["parameters"]
    for ranks in (results[:ranks_per_host], results[ranks_per_host:]):
        between = sum(result["wire_bytes_between_hosts"] for result in ranks)
        assert STEPS * parameters <= between < 1.03 * STEPS * parameters
        # The kernel counts headers, acknowledgements and heartbeats too; full precision would be four times as much.
        seen = max(result["seen_on_the_wire"] for result in ranks)
        assert between <= seen < 1.3 * between
