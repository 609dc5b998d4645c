# SPDX-License-Identifier: Apache-2.0
"""The pulse of a member: a process is seen to live while it is there, stopped or not, and at once no more after."""

import contextlib
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from bagua import _pulse
from bagua._pulse import Feeler, Pulse, Sign
from holdings import wait_for

HANDLE = "bagua:0:0:0:127.0.0.1"
_SCRIPT = f"""
import sys
from bagua._pulse import Pulse
pulse = Pulse({HANDLE!r})
print(pulse.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with subprocess.Popen(
        [sys.executable, "-c", _SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


def test_a_process_lives_until_it_is_killed_also_while_it_is_stopped(other: tuple[subprocess.Popen[str], str]) -> None:
    process, name = other
    process.send_signal(signal.SIGSTOP)
    with contextlib.ExitStack() as stack:
        feelers = [stack.enter_context(Feeler()) for _ in range(50)]
        begin = time.monotonic()
        # As often as many members look in half a minute.
        for _ in range(100):
            assert all(feeler.signs([name]) == {name: Sign.LIVES} for feeler in feelers)
        assert time.monotonic() - begin < 3
        process.kill()
        process.wait()
        assert all(feeler.signs([name]) == {name: Sign.ENDED} for feeler in feelers)


def test_the_pulse_gets_over_strangers_who_talk_and_a_time_without_file_descriptors() -> None:
    pulse = Pulse(HANDLE)
    address = ("127.0.0.1", int(pulse.name.split(":")[0]))
    with socket.create_connection(address) as stranger, socket.socket() as knocking, Feeler() as feeler:
        stranger.sendall(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionResetError):
            # A name, and the end.
            while stranger.recv(100):
                pass
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            knocking.connect(address)
            time.sleep(0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert feeler.signs([pulse.name]) == {pulse.name: Sign.LIVES}
        pulse.stop()
        assert feeler.signs([pulse.name]) == {pulse.name: Sign.ENDED}


def test_a_process_that_has_the_port_of_one_that_ended_is_not_taken_for_it() -> None:
    pulse = Pulse(HANDLE)
    former = pulse.name.replace("bagua:0", "bagua:1")
    with Feeler() as feeler:
        assert wait_for(lambda: feeler.signs([former]) == {former: Sign.ENDED}, 5)
        # It has said its name to this one, too, which does not hide its end.
        assert feeler.signs([pulse.name]) == {pulse.name: Sign.LIVES}
        time.sleep(0.1)
        assert feeler.signs([former, pulse.name]) == {former: Sign.ENDED, pulse.name: Sign.LIVES}
        pulse.stop()
        assert feeler.signs([former, pulse.name]) == {former: Sign.ENDED, pulse.name: Sign.ENDED}


def _sleep() -> None:
    time.sleep(60)


def test_a_forked_worker_does_not_keep_the_pulse_of_a_member_that_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    # The fork comes while a connection is being taken.
    monkeypatch.setattr(
        _pulse, "_keep_alive", lambda _: time.sleep(0.3 * (threading.current_thread().name == "bagua_pulse"))
    )
    pulse = Pulse(HANDLE)
    with Feeler() as feeler:
        assert feeler.signs([pulse.name]) == {pulse.name: Sign.LIVES}
        worker = multiprocessing.get_context("fork").Process(target=_sleep)
        worker.start()
        try:
            pulse.stop()
            assert worker.is_alive()
            assert wait_for(lambda: feeler.signs([pulse.name]) == {pulse.name: Sign.ENDED})
        finally:
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()
