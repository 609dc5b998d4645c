# SPDX-License-Identifier: Apache-2.0
"""`python -m bagua.info --nccl-net` and what bagua.info says of NCCL's network."""

import subprocess
import sys
from pathlib import Path

import pytest
from bagua.info import nccl_net

_NAMES = ("NCCL_NET_PLUGIN", "NCCL_NET", "BAGUA_NCCL_NET", "BAGUA_JOB_SECRET", "BAGUA_JOB_SECRET_FILE")


def test_the_command_prints_a_library_that_exists_and_nothing_else() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "bagua.info", "--nccl-net"], capture_output=True, text=True, check=True
    ).stdout
    path = Path(printed.rstrip("\n"))
    assert path.name == "libnccl-net-bagua.so"
    assert path.is_file()


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "NCCL's own network (BAGUA_NCCL_NET=1 takes NET/bagua)"),
        ({"BAGUA_NCCL_NET": "1"}, "NET/bagua, for groups of backend 'bagua'"),
        ({"NCCL_NET_PLUGIN": str(nccl_net.path())}, "NET/bagua, by NCCL_NET_PLUGIN"),
        ({"NCCL_NET_PLUGIN": str(nccl_net.path()), "NCCL_NET": "Socket"}, "NCCL's own network"),
        ({"NCCL_NET_PLUGIN": "aws-ofi"}, "NCCL's own network"),
        ({"BAGUA_NCCL_NET": "1", "NCCL_NET": "Socket"}, "nothing: NET/bagua is to, and NCCL_NET='Socket'"),
    ],
    ids=["nothing", "switch", "plugin", "another network", "another plugin", "switch against another network"],
)
def test_it_is_said_what_carries_cuda_tensors(
    env: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in _NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert nccl_net.in_use().startswith(expected)
