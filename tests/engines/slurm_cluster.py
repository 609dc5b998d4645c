# SPDX-License-Identifier: Apache-2.0
"""A Slurm cluster of Debian's packages on one machine, for as long as a test takes.

Each node is an emulated host with a network, a name, processes and a /dev/shm of its own, and runs a slurmd. The first
one's network is the controller's too. The end of a namespace ends whatever runs in it.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bagua.bench.emulated_hosts import Host
from two_hosts import hosts_over

# Program -> Debian's package.
PROGRAMS = {
    "munged": "munge",
    "sbatch": "slurm-client",
    "sinfo": "slurm-client",
    "squeue": "slurm-client",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
}
SECONDS = 60
CONTROLLER = "controller"
# More processors than this machine may have: what the batch scripts ask for is to be there.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={controller}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
NodeName={nodes} CPUs=16
PartitionName=all Nodes={nodes} Default=YES State=UP
"""


def missing_packages() -> list[str]:
    """Return Debian's packages that a cluster needs and this machine lacks."""
    return sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})


@dataclass(frozen=True)
class Cluster:
    """Two nodes that are up."""

    folder: Path
    controller: Host
    nodes: Sequence[str]

    def _environment(self, variables: dict[str, str]) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), **variables}

    def ask(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm's on the controller's network."""
        return subprocess.run(
            self.controller.command(command),
            env=self._environment(variables),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    def are_nodes_idle(self) -> bool:
        states = self.ask("sinfo", "--noheader", "--Node", "--format", "%T").stdout.split()
        return states == ["idle"] * len(self.nodes)

    def state_at_the_end_of(self, job: str, seconds: float) -> str:
        """Wait for a job; return Slurm's word for how it ended, or for what it does when the time is over."""
        end = time.monotonic() + seconds
        while True:
            asked = self.ask("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")
            state = asked.stdout.strip()
            if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING") or time.monotonic() > end:
                return state
            time.sleep(0.5)

    def logs(self) -> str:
        return "\n".join(f"== {file.name}\n{file.read_text()}" for file in sorted(self.folder.glob("*.log")))


@contextmanager
def _daemon(log: Path, command: Sequence[str], variables: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        # unshare takes no notice of SIGTERM.
        process.kill()
        process.wait()


def _on_host(host: Host, name: str, hosts_file: Path, *command: str) -> list[str]:
    """Return the command line of a daemon on a machine of this name; its end, however it comes, ends its processes."""
    prepare = f'mount --bind "{hosts_file}" /etc/hosts && mount -t tmpfs tmpfs /dev/shm && hostname {name} && exec "$@"'
    namespaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return host.command([*namespaces, "sh", "-c", prepare, "sh", *command])


def _wait_until_up(cluster: Cluster, daemons: Sequence[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + SECONDS
    while not cluster.are_nodes_idle():
        assert all(daemon.poll() is None for daemon in daemons), cluster.logs()
        assert time.monotonic() < end, cluster.logs()
        time.sleep(0.5)


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Start two nodes and their controller, with all files in `folder`, and stop them."""
    with ExitStack() as stack:
        hosts = stack.enter_context(hosts_over())
        nodes = [f"node{i}" for i in range(len(hosts))]
        cluster = Cluster(folder, hosts[0], nodes)
        names = [f"{host.address} {node}" for host, node in zip(hosts, nodes, strict=True)]
        hosts_file = folder / "hosts"
        hosts_file.write_text("\n".join(["127.0.0.1 localhost", *names, f"{hosts[0].address} {CONTROLLER}"]) + "\n")
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(controller=CONTROLLER, address=hosts[0].address, folder=folder, nodes=",".join(nodes))
        )
        # Neither kind of cgroups is there, and the plugin of the older one needs none.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))

        def start(name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
            variables = {"SLURM_CONF": str(folder / "slurm.conf")}
            return stack.enter_context(_daemon(folder / f"{name}.log", command, variables))

        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munged.txt"}
        files["seed-file"] = "munge.seed"
        # --force: nobody but this user is to reach the socket.
        munged = ["munged", "--foreground", "--force", *(f"--{key}={folder / file}" for key, file in files.items())]
        daemons = [start("munged", munged)]
        daemons.append(start("slurmctld", _on_host(hosts[0], CONTROLLER, hosts_file, "slurmctld", "-D")))
        for host, node in zip(hosts, nodes, strict=True):
            daemons.append(start(f"slurmd-{node}", _on_host(host, node, hosts_file, "slurmd", "-D")))
        _wait_until_up(cluster, daemons)
        yield cluster
