# SPDX-License-Identifier: Apache-2.0
"""bagua.elastic: hosts that are cut off from the others, and come back. On emulated hosts: needs root and iproute2."""

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from bagua.bench.emulated_hosts import Host
from two_hosts import hosts_over, set_link

pytestmark = [
    pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has reconfigure from 2.14 on"),
    pytest.mark.long,
]
SCRIPT = Path(__file__).with_name("elastic_host.py")
PORT = 29510
SECONDS = 90.0


class _Job:
    """A member on each host, whose words are in files."""

    def __init__(self, hosts: list[Host], folder: Path) -> None:
        self._folder = folder
        self.hosts = hosts
        serve = hosts[0].command([sys.executable, "-m", "bagua.elastic", "--port", str(PORT)])
        self._store = subprocess.Popen(serve, env=hosts[0].environment(), stdout=subprocess.DEVNULL)
        self._members = [self._start(number) for number in range(len(hosts))]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        host, end = self.hosts[number], self._folder / "last step"
        command = [sys.executable, str(SCRIPT), str(number), self.hosts[0].address, str(PORT), str(end)]
        with (self._folder / str(number)).open("wb") as log:
            environment = {**host.environment(), "OMP_NUM_THREADS": "1"}
            return subprocess.Popen(host.command(command), env=environment, stdout=log, stderr=log)

    def text(self, number: int) -> str:
        return (self._folder / str(number)).read_text()

    def steps(self, number: int) -> list[tuple[int, int]]:
        """Return steps, and with how many members each was."""
        return [(int(step), int(size)) for step, size in re.findall(r"^step (\d+) of (\d+)$", self.text(number), re.M)]

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS
        while not is_so():
            assert time.monotonic() < end, "\n".join(self.text(number)[-3000:] for number in range(len(self.hosts)))
            time.sleep(0.1)

    def wait_for_steps(self, number: int, size: int, count: int) -> None:
        """Wait until a member has taken so many more steps in a group of this size."""
        begun = len(self.steps(number))
        self.wait_until(lambda: sum(members == size for _, members in self.steps(number)[begun:]) >= count)

    def end(self) -> list[str]:
        """Return the digests of all members' weights after a last step."""
        (self._folder / "last step").write_text(str(self.steps(0)[-1][0] + 40))
        texts = []
        for number, member in enumerate(self._members):
            assert member.wait(SECONDS) == 0, self.text(number)[-3000:]
            texts += re.findall("weights (.*)", self.text(number))
        return texts

    def kill(self) -> None:
        for process in [*self._members, self._store]:
            process.kill()
            process.wait()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[_Job]:
    with hosts_over(count=3) as hosts, contextlib.ExitStack() as stack:
        job = _Job(hosts, tmp_path)
        stack.callback(job.kill)
        job.wait_until(lambda: all(job.steps(number) for number in range(len(hosts))))
        yield job


def test_others_go_on_without_a_host_that_is_cut_off_and_with_it_when_it_is_back(job: _Job) -> None:
    set_link(job.hosts[2], "down")
    job.wait_for_steps(0, size=2, count=5)
    steps_alone = len(job.steps(2))
    set_link(job.hosts[2], "up")
    job.wait_for_steps(0, size=3, count=5)
    # It has not trained by itself meanwhile.
    assert all(size == 3 for _, size in job.steps(2)[:steps_alone])
    first, *others = job.end()
    assert others == [first] * 2


def test_a_host_that_is_cut_off_for_some_seconds_stays_a_member(job: _Job) -> None:
    set_link(job.hosts[2], "down")
    time.sleep(5)
    set_link(job.hosts[2], "up")
    job.wait_for_steps(0, size=3, count=5)
    first, *others = job.end()
    assert others == [first] * 2
    assert all(size == 3 for _, size in job.steps(0))
