# SPDX-License-Identifier: Apache-2.0
"""Scripts that torchrun starts on two ranks, and what is expected of the text that they print."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# An agent and two ranks import torch, on cores that others use too; some compile an extension first.
SECONDS = 400


def ended(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program of Python's to its end, which is to be a success."""
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def output_of_ranks(script: Path, *arguments: str, are_hosts: bool = True, python: str = sys.executable) -> str:
    """Run a script on two ranks, each of which is a host by itself, between which gradients are coded, or is not."""
    start = 'exec "$0" "$@"'
    if are_hosts:
        start = f"BAGUA_HOST_ID=host-$RANK {start}"
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    return ended(*command, "sh", "-c", start, python, str(script), *arguments).stdout


def losses_of(text: str) -> list[float]:
    """Those of steps. transformers writes 3.000 as 3, and ends with the mean, train_loss."""
    return [float(loss) for loss in re.findall(r"(?<!train_)loss'?:? '?(\d+(?:\.\d+)?(?:e[-+]\d+)?)", text)]


def check_training(text: str, shares: Sequence[float] = ()) -> None:
    """Check that the loss has become half, and between which shares of the bytes of gradients lie those sent."""
    losses = losses_of(text)
    assert losses[-1] < losses[0] / 2, text
    if shares:
        figures = re.search(r"([\d,]+) bytes of gradients, ([\d,]+) bytes sent", text)
        assert figures is not None, text
        gradients, sent = (int(figure.replace(",", "")) for figure in figures.groups())
        assert shares[0] <= sent / gradients < shares[1]
