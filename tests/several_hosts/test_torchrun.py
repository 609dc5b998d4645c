# SPDX-License-Identifier: Apache-2.0
"""torchrun on two hosts with a network of their own each, as docs/several_machines.md describes it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bagua.bench.emulated_hosts import Host
from two_hosts import SCRIPT, check_two_hosts, hosts_over, results_of

# Agents and ranks import torch, on cores that others use too.
SECONDS = 400


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with hosts_over() as made:
        yield made


def _run(folder: Path, hosts: list[Host], ranks_per_host: int, meeting: list[list[str]]) -> list[dict[str, Any]]:
    """What each rank saw, by rank."""
    agents = []
    for host, own in zip(hosts, meeting, strict=True):
        torchrun = ["-m", "torch.distributed.run", f"--nnodes={len(hosts)}", f"--nproc-per-node={ranks_per_host}"]
        command = host.command([sys.executable, *torchrun, *own, str(SCRIPT), str(folder)])
        environment = {**host.environment(), "OMP_NUM_THREADS": "1"}
        agents.append(
            subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    try:
        outputs = [agent.communicate(timeout=SECONDS)[0] for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGTERM)  # the agent ends its ranks
                agent.wait(timeout=SECONDS)
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    return results_of(folder)


def test_static_rendezvous(hosts: list[Host], tmp_path: Path) -> None:
    address = ["--master-addr", hosts[0].address, "--master-port", "29517"]
    check_two_hosts(_run(tmp_path, hosts, 2, [["--node-rank", "0", *address], ["--node-rank", "1", *address]]), 2)


@pytest.mark.long
def test_elastic_rendezvous(hosts: list[Host], tmp_path: Path) -> None:
    endpoint = ["--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"{hosts[0].address}:29518"]
    # Both hosts have the machine's name, by which the ranks would be told to meet.
    check_two_hosts(_run(tmp_path, hosts, 1, [[*endpoint, "--local-addr", host.address] for host in hosts]), 1)
