# SPDX-License-Identifier: Apache-2.0
"""`python -m bagua.info` under torchrun on two hosts says what the line between them is like."""

import os
import re
import signal
import subprocess
import sys

import pytest
from bagua.bench.emulated_hosts import Network
from two_hosts import hosts_over

# Ranks import torch, on cores that others use too.
SECONDS = 400


@pytest.mark.long
def test_info_tells_congestion_control_round_trip_and_losses() -> None:
    with hosts_over(Network(100e6, 0.02, 0.01, buffer=0.05, congestion=("cubic",))) as hosts:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        meeting = [f"--master-addr={hosts[0].address}", "--master-port=29517"]
        agents = [
            subprocess.Popen(
                host.command([*torchrun, *meeting, f"--node-rank={index}", "-m", "bagua.info"]),
                env={**host.environment(), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for index, host in enumerate(hosts)
        ]
        try:
            text = agents[0].communicate(timeout=SECONDS)[0]
            assert [agent.wait(timeout=SECONDS) for agent in agents] == [0, 0]
        finally:
            for agent in agents:
                if agent.poll() is None:
                    os.killpg(agent.pid, signal.SIGTERM)  # the agent ends its ranks
    found = re.search(r"line between hosts: cubic, round trip (\S+) ms, (\S+) % of ([\d,]+) packets sent again", text)
    assert found is not None, text
    assert 20 <= float(found[1]) < 60
    assert 0.1 < float(found[2]) < 5
    # A MiB each way, twice, by half and half.
    assert int(found[3].replace(",", "")) > 2 << 20 >> 11
