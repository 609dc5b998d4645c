# SPDX-License-Identifier: Apache-2.0
"""An operation that takes unusually long: one warning, by one rank, that names the rank that all wait for."""

import os
import signal
import subprocess
import time

import bagua
import pytest
import torch
import torch.distributed as dist
from hooked_models import captured_stderr
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel as DDP
from trouble import TAKES_ALL, TRANSPORTS, VICTIM, selection, warm_up

SIZE = 3


def _wait_for_a_slow_rank() -> str:
    warm_up()
    with captured_stderr() as written:
        if dist.get_rank() == VICTIM:
            # Longer than the others wait before they warn, and than the ranks may take to answer.
            time.sleep(4.0)
        dist.all_reduce(torch.ones(5))
        return written()


@pytest.mark.parametrize("transport", selection(TRANSPORTS, ["in-host"]))
def test_the_rank_that_all_wait_for_is_named_once(transport: str) -> None:
    texts = run_ranks(SIZE, _wait_for_a_slow_rank, env={**TRANSPORTS[transport], "BAGUA_WARN_AFTER_SECONDS": "1"})
    warnings = [line for text in texts for line in text.splitlines() if "has been in bagua:all_reduce #2" in line]
    # The next one would come after twice the time that the first one told.
    assert 1 <= len(warnings) <= 2, texts
    teller = next(rank for rank, text in enumerate(texts) if warnings[0] in text)
    assert f"Not there: rank {VICTIM} (has nothing under way, last completed bagua:all_reduce #1" in warnings[0]
    assert f"Waiting as well: rank {1 - teller}." in warnings[0]


@pytest.mark.skipif(not TAKES_ALL, reason="make test-faults takes it")
def test_the_warning_can_be_switched_off() -> None:
    texts = run_ranks(SIZE, _wait_for_a_slow_rank, env={"BAGUA_WARN_AFTER_SECONDS": "0"})
    assert not any("has been in" in text for text in texts)


# Its kernel answers whoever connects; a second connection is opened after twelve seconds without a word of the process.
STOPPED_SECONDS = 14.0


def _stop_before_the_first_operation() -> int:
    """Return how many connections have been replaced."""
    if dist.get_rank() == 1:
        own = os.getpid()
        subprocess.Popen(["sh", "-c", f"sleep {STOPPED_SECONDS}; kill -CONT {own}"])
        os.kill(own, signal.SIGSTOP)
    for numel in (5, 500_000):
        tensor = torch.ones(numel)
        dist.all_reduce(tensor)
        assert tensor.eq(float(dist.get_world_size())).all()
    handle = bagua.register_comm_hook(DDP(torch.nn.Linear(5, 5)), "bytegrad")
    return handle.stats()["reconnections"]


@pytest.mark.long
def test_connections_to_a_rank_that_is_stopped_at_first_are_not_taken_for_broken() -> None:
    begun = time.monotonic()
    replaced = run_ranks(2, _stop_before_the_first_operation, env=TRANSPORTS["between-hosts"])
    assert time.monotonic() - begun > STOPPED_SECONDS
    assert replaced == [0, 0]
