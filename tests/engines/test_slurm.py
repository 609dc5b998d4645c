# SPDX-License-Identifier: Apache-2.0
"""The batch scripts that docs/several_machines.md names, on a Slurm cluster of two nodes with networks of their own."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster, missing_packages, slurm_cluster
from two_hosts import SCRIPT, check_two_hosts, results_of

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"
# Agents and ranks import torch, on cores that others use too.
SECONDS = 400


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if missing := missing_packages():
        pytest.skip(f"Slurm is not installed: make test-engines as root, or apt-get install {' '.join(missing)}")
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def _run_job(cluster: Cluster, folder: Path, batch_script: str, *options: str, **variables: str) -> None:
    """Every rank writes a file into the folder."""
    output = folder / "job.txt"
    submitted = cluster.ask(
        *("sbatch", "--parsable", f"--output={output}", *options),
        *(str(EXAMPLES / batch_script), str(SCRIPT), str(folder)),
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        OMP_NUM_THREADS="1",
        # torch warns that addresses have no names, of which there are none.
        TORCH_CPP_LOG_LEVEL="ERROR",
        **variables,
    )
    assert submitted.returncode == 0, submitted.stderr
    state = cluster.state_at_the_end_of(submitted.stdout.strip(), SECONDS)
    assert state == "COMPLETED", output.read_text() if output.exists() else cluster.logs()


def test_torchrun_on_each_node(cluster: Cluster, tmp_path: Path) -> None:
    _run_job(cluster, tmp_path, "slurm.sbatch", RANKS_PER_NODE="1")
    check_two_hosts(results_of(tmp_path), ranks_per_host=1)


def test_a_task_for_each_rank(cluster: Cluster, tmp_path: Path) -> None:
    _run_job(cluster, tmp_path, "slurm_tasks.sbatch", "--ntasks-per-node=2")
    check_two_hosts(results_of(tmp_path), ranks_per_host=2)
