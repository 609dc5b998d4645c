# SPDX-License-Identifier: Apache-2.0
"""BAGUA_PORT: where ranks listen, so that a firewall can let them through."""

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bagua._native import _C
from bagua._pulse import Pulse, address_of
from bagua.elastic import Members
from holdings import holdings, left_behind
from ranks import run_ranks

_HOSTS = ["one", "one", "other"]
_needs_reconfigure = pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has reconfigure from 2.14 on")


def _own_port() -> int:
    (line,) = [line for line in _C.own_record().splitlines() if line.startswith("address=")]
    return int(line.rsplit(":", 1)[1])


def _free_ports(count: int) -> range:
    """Return so many neighbouring ports that nobody uses."""
    for first in range(24_000, 32_000, count):
        ports = range(first, first + count)
        try:
            for port in ports:
                with socket.create_server(("127.0.0.1", port)):
                    pass
        except OSError:
            continue
        return ports
    raise RuntimeError("no free ports")


def _limited_to(ports: range) -> dict[str, Any]:
    return {"BAGUA_HOST_ID": _HOSTS, "BAGUA_PORT": f"{ports[0]}-{ports[-1]}", "MASTER_ADDR": "127.0.0.1"}


def _sum_and_port() -> tuple[float, int]:
    ones = torch.ones(3)
    dist.all_reduce(ones)
    return ones[0].item(), _own_port()


def test_every_rank_takes_one_port_of_the_range() -> None:
    ports = _free_ports(len(_HOSTS))
    seen = run_ranks(len(_HOSTS), _sum_and_port, env=_limited_to(ports))
    assert [total for total, _ in seen] == [3.0] * len(_HOSTS)
    assert sorted(port for _, port in seen) == list(ports)


def _ports_of_a_member() -> list[int]:
    dist.destroy_process_group()
    dist.init_process_group("bagua", store=dist.HashStore(), rank=0, world_size=1, enable_reconfigure=True)
    handle = dist._get_reconfigure_handle()
    pulse = Pulse(handle)
    pulse.stop()
    dist.destroy_process_group()
    return [_own_port(), int(handle.split(":")[3]), address_of(pulse.name)[1]]


@_needs_reconfigure
def test_members_that_come_and_go_are_met_and_felt_at_ports_of_the_range() -> None:
    ports = _free_ports(3 * len(_HOSTS))
    for taken in run_ranks(len(_HOSTS), _ports_of_a_member, env=_limited_to(ports)):
        assert len(set(taken)) == 3
        assert set(taken) <= set(ports)


def _member_without_a_port() -> list[str]:
    dist.destroy_process_group()
    # What a process keeps for good is there.
    Members(dist.HashStore()).close()
    before = holdings()
    _, last = _C.listening_ports()
    with socket.create_server(("127.0.0.1", last)), pytest.raises(OSError, match=r"none of .* is free: .* takes three"):
        Members(dist.HashStore())
    assert not dist.is_initialized()
    left = left_behind(before)
    Members(dist.HashStore()).close()
    return left


@_needs_reconfigure
def test_a_member_that_finds_no_port_leaves_nothing_and_tries_again_once_there_is_one() -> None:
    assert run_ranks(1, _member_without_a_port, env=_limited_to(_free_ports(3))) == [[]]


def _error_of_a_sum() -> str:
    with pytest.raises((RuntimeError, ValueError)) as error:
        dist.all_reduce(torch.ones(3))
    return str(error.value)


def test_too_few_ports_are_an_error_on_all_ranks_that_says_so() -> None:
    ports = _free_ports(1)
    for text in run_ranks(len(_HOSTS), _error_of_a_sum, env=_limited_to(ports)):
        assert f"all ports of BAGUA_PORT={ports[0]}-{ports[0]} are taken" in text


def test_a_switch_that_is_neither_0_nor_1_is_an_error_on_all_ranks() -> None:
    for text in run_ranks(2, _error_of_a_sum, env={"BAGUA_SHARED_MEMORY": "false"}):
        assert "BAGUA_SHARED_MEMORY is to be 0 or 1, got 'false'" in text


@pytest.mark.parametrize("value", ["http", "0", "70000", "29599-29500", "29500-", "29500,29501"])
def test_what_is_no_port_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_PORT", value)
    with pytest.raises(ValueError, match="BAGUA_PORT is to be a port from 1 to 65535"):
        _C.listening_ports()
    monkeypatch.setenv("BAGUA_PORT", "29500-29599")
    assert _C.listening_ports() == (29500, 29599)
