# SPDX-License-Identifier: Apache-2.0
"""torchrun on two hosts with a network of their own each, as docs/several_machines.md describes it."""

import re
from pathlib import Path

import pytest
from bagua.bench.emulated_hosts import Host, Network
from script_ranks import run_script
from two_hosts import SCRIPT, check_two_hosts, hosts_over, results_of


def _run(folder: Path, hosts: list[Host], *arguments: str, **of_hosts: list[str]) -> str:
    """Run torchrun on each of two hosts; return what the first has printed. `of_hosts` are options that differ."""
    env = {f"PET_{name.upper()}": values for name, values in of_hosts.items()}
    # Ranks import torch, on cores that others use too.
    torchrun = "import torch.distributed.run as run; run.main()"
    return run_script(torchrun, 2, folder, "--nnodes=2", *arguments, env=env, timeout=400, hosts=hosts)[0].output


def _meeting(hosts: list[Host]) -> list[str]:
    return [f"--master-addr={hosts[0].address}", "--master-port=29517"]


def test_static_rendezvous(tmp_path: Path) -> None:
    with hosts_over() as hosts:
        script = ["--nproc-per-node=2", *_meeting(hosts), str(SCRIPT), str(tmp_path)]
        _run(tmp_path, hosts, *script, node_rank=["0", "1"])
    check_two_hosts(results_of(tmp_path), 2)


@pytest.mark.long
def test_elastic_rendezvous(tmp_path: Path) -> None:
    with hosts_over() as hosts:
        endpoint = ["--rdzv-backend=c10d", "--rdzv-id=job", f"--rdzv-endpoint={hosts[0].address}:29518"]
        # Both hosts have the machine's name, by which the ranks would be told to meet.
        own = [host.address for host in hosts]
        _run(tmp_path, hosts, "--nproc-per-node=1", *endpoint, str(SCRIPT), str(tmp_path), local_addr=own)
    check_two_hosts(results_of(tmp_path), 1)


@pytest.mark.long
def test_info_tells_congestion_control_round_trip_and_losses(tmp_path: Path) -> None:
    with hosts_over(Network(100e6, 0.02, 0.01, buffer=0.05, congestion=("cubic",))) as hosts:
        info = ["--nproc-per-node=1", *_meeting(hosts), "-m", "bagua.info"]
        text = _run(tmp_path, hosts, *info, node_rank=["0", "1"])
    found = re.search(r"line between hosts: cubic, round trip (\S+) ms, (\S+) % of ([\d,]+) packets sent again", text)
    assert found is not None, text
    assert 20 <= float(found[1]) < 60
    assert 0.1 < float(found[2]) < 5
    # A MiB each way, twice, by half and half.
    assert int(found[3].replace(",", "")) > 2 << 20 >> 11
