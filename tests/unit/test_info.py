# SPDX-License-Identifier: Apache-2.0
"""`python -m bagua.info`: the facts, and the advice for machines that lack something."""

import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bagua
import pytest
import torch
from bagua.info import congestion, network
from bagua.info import facts as facts_module
from bagua.info.connections import Line, connections, line_between, together
from bagua.info.facts import advice, facts, table
from bagua.info.ranks import hosts_of, summary
from script_ranks import run_script

SECONDS = 300


def _advice() -> str:
    return "\n".join(advice(facts()))


def test_facts_name_versions_devices_transports_and_algorithms() -> None:
    found = facts()
    assert found["bagua"] == bagua.__version__
    assert found["torch"] == torch.__version__
    assert "lo 127.0.0.1" in found["interfaces"]
    assert found["CPU tensors, between hosts"].startswith("bagua's own transport, at ")
    assert not any("Gloo" in value for value in found.values())
    assert found["algorithms"].split(", ") == bagua.available_algorithms()
    lines = table(found).splitlines()
    assert len(lines) == len(found)
    assert len({line.index(value) for line, value in zip(lines, found.values(), strict=True)}) == 1


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BAGUA_PORT", "BAGUA_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", ["BAGUA_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def test_bagua_listens_where_it_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "lo")
    assert network.listening_address() == ("127.0.0.1", f"{name}=lo")
    assert "others cannot reach 127.0.0.1, where bagua listens" in _advice()
    monkeypatch.setenv(name, "nosuch0")
    assert facts()["CPU tensors, between hosts"].startswith("nothing: bagua: no network interface 'nosuch0' is up")
    assert "type 'export BAGUA_SOCKET_IFNAME=" in _advice()


def test_a_container_on_an_older_kernel_has_no_lists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(congestion, "_SETTINGS", tmp_path)
    own = congestion.in_use()
    assert facts()["congestion control"].startswith(f"{own} (allowed: {own}")
    assert f'"{" ".join(dict.fromkeys([own, "bbr"]))}"' in congestion.commands_for_bbr()[1]


def test_of_several_interfaces_for_gloo_the_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nosuch0")
    assert network.listening_address()[0] == "127.0.0.1"


def test_a_job_on_one_machine_listens_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert network.listening_address() == ("127.0.0.1", "from which MASTER_ADDR=127.0.0.1 is reached")
    monkeypatch.setattr(network, "interfaces", lambda: {"lo": "127.0.0.1", "eth7": "10.1.2.3"})
    assert "type 'export BAGUA_SOCKET_IFNAME=eth7' on each" in _advice()


def test_several_ways_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "listening_address", lambda: ("10.0.0.1", "MASTER_ADDR is not set"))
    monkeypatch.setattr(network, "interfaces", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.9.0.1"})
    assert "one of eth0, ib0" in _advice()


def test_ports_that_are_named_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("", "any port"), ("29500", "port 29500"), ("29500-29599", "ports 29500 to 29599")):
        monkeypatch.setenv("BAGUA_PORT", value)
        assert facts()["CPU tensors, between hosts"].endswith(f"), {expected}")
    monkeypatch.setenv("BAGUA_PORT", "http")
    assert "BAGUA_PORT is to be a port" in facts()["CPU tensors, between hosts"]


def test_an_administrator_is_told_how_to_allow_bbr(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tcp_allowed_congestion_control").write_text("reno cubic\n")
    monkeypatch.setattr(congestion, "_SETTINGS", tmp_path)
    monkeypatch.setattr(congestion, "in_use", lambda: "cubic")
    monkeypatch.setattr(congestion, "allowed", lambda: ["reno", "cubic"])
    assert facts()["congestion control"] == "cubic (allowed: reno, cubic)"
    text = _advice()
    assert "'modprobe tcp_bbr' and 'sysctl -w net.ipv4.tcp_allowed_congestion_control=\"reno cubic bbr\"'" in text
    monkeypatch.setattr(congestion, "allowed", lambda: ["reno", "cubic", "bbr"])
    assert "bbr" not in _advice()
    monkeypatch.setattr(congestion, "in_use", lambda: "bbr")
    assert "bbr" not in _advice()


def test_congestion_controls_are_those_of_the_kernel() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = congestion.available()
        assert congestion.in_use() in names
        assert set(congestion.allowed()) <= set(names)
        for name in congestion.allowed():
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


def test_connections_of_this_process_are_counted() -> None:
    here = ("127.0.0.1", 0)
    with (
        socket.create_server(("127.0.0.2", 0)) as server,
        socket.create_connection(server.getsockname(), source_address=here) as one,
        socket.create_server(here) as near,
        socket.create_connection(near.getsockname()) as inside,
    ):
        accepted, _ = server.accept()
        with accepted:
            before = connections()
            ends = (str(one.getsockname()), str(one.getpeername()))
            assert before[ends].segments == 0
            assert (str(inside.getsockname()), str(inside.getpeername())) not in before
            one.sendall(b"some")
            accepted.recv(4)
            line = line_between(before, connections())
    # Other tests' threads may have sent something, too.
    assert line.segments >= 1
    assert congestion.in_use() in line.congestion
    assert 0 < line.least_round_trip <= line.round_trip < 1
    assert ends not in connections()


def test_sockets_that_are_looked_at_stay_as_they_are() -> None:
    one, other = socket.socketpair()
    with one, other:
        socket.setdefaulttimeout(5)
        try:
            files = len(os.listdir("/proc/self/fd"))
            connections()
            assert len(os.listdir("/proc/self/fd")) == files
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(one.fileno())
        one.send(b"some")
        assert other.recv(4) == b"some"


def test_lines_are_added_up_by_their_packets() -> None:
    lines = [Line(("cubic",), 300, 3, 0.02, 0.01), Line(), Line(("bbr",), 100, 5, 0.06, 0.015)]
    assert together(lines) == Line(("bbr", "cubic"), 400, 8, pytest.approx(0.03), 0.01)
    assert together(lines).resent_share == pytest.approx(0.02)
    assert together([]) == Line()


def test_bagua_alone_names_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_module("bagua", run_name="__main__")
    printed = capsys.readouterr().out
    assert "python -m bagua.info" in printed
    assert "python -m bagua.bench" in printed


def test_shared_memory_that_is_small_missing_or_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = SimpleNamespace(free=3 << 20, total=64 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert "(3 of 64 MiB of /dev/shm are free)" in facts()["CPU tensors, in a host"]
    assert "--shm-size=1g" in _advice()
    monkeypatch.setattr(facts_module, "_SHARED_MEMORY", tmp_path / "none")
    assert facts()["CPU tensors, in a host"].startswith("sockets, because")
    monkeypatch.setenv("BAGUA_SHARED_MEMORY", "0")
    assert "type 'unset BAGUA_SHARED_MEMORY'" in _advice()
    assert "BAGUA_SHARED_MEMORY=0" in facts()["settings"]


def _pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], built: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    gpu = SimpleNamespace(name="GPU", total_memory=8 << 30, major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    monkeypatch.setattr(facts_module._build_info, "CUDA_VERSION", "13.0" if built else None)
    monkeypatch.setattr(facts_module._build_info, "CUDA_ARCHS", built)


def test_a_gpu_without_cuda_in_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_gpu(monkeypatch, (9, 0), [])
    assert "bagua was built without CUDA" in _advice()
    assert facts()["CUDA tensors"] == "nothing"


def test_a_gpu_of_an_architecture_that_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_gpu(monkeypatch, (7, 5), ["sm_80", "sm_90"])
    assert "cmake.define.BAGUA_CUDA_ARCHS=75" in _advice()
    assert facts()["CUDA tensors"] == "NCCL"
    _pretend_gpu(monkeypatch, (8, 6), ["sm_80", "sm_90"])
    assert "BAGUA_CUDA_ARCHS" not in _advice()


def test_packages_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    # A folder of that name that happens to be here has no origin.
    specs = {"matplotlib": ModuleSpec("matplotlib", None)}
    found = ModuleSpec("found", None, origin="found.py")
    monkeypatch.setattr(facts_module.importlib.util, "find_spec", lambda name: specs.get(name, found))
    text = _advice()
    assert "pip install matplotlib" in text
    assert "pip install lightning" not in text


def _rank(host: str, notes: list[str], **changes: str) -> dict[str, Any]:
    found = {"host id": host, "torch": "2.15.0", "interfaces": host, "CPU tensors, between hosts": "at 10.0.0.1"}
    return {"host": f"name-{host}", "facts": {**found, **changes}, "notes": notes}


def test_summary_names_hosts_differences_and_whose_notes_they_are() -> None:
    assert hosts_of(["b", "a", "b", "c"]) == [[0, 2], [1], [3]]
    first, second = _rank("a", ["both"], new="1"), _rank("b", ["both", "one"], torch="2.14.0")  # of an older version
    assert "note: new is not the same everywhere: rank 0 has nothing; rank 1 has 1" in summary([second, first])
    lines = list(summary([first, second, first]))
    assert lines[0] == "\n3 ranks on 2 hosts"
    assert lines[1] == "host 0  name-a, ranks 0, 2; at 10.0.0.1"
    assert lines[2].startswith("host 1  name-b, ranks 1;")
    assert lines[3:] == [
        "note: new is not the same everywhere: rank 0 has 1; rank 1 has nothing",
        "note: torch is not the same everywhere: rank 0 has 2.15.0; rank 1 has 2.14.0",
        "note: both",
        "note: ranks 1: one",
    ]


@pytest.mark.long
def test_ranks_of_torchrun_try_whether_they_reach_each_other() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "bagua.info", "--timeout", "60"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on 1 host" in done.stdout
    assert "all ranks reach each other: all_reduce of 1 MiB" in done.stdout
    assert done.stdout.count("algorithms ") == 1  # rank 0 speaks for all
    done = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert [set(entry) for entry in json.loads(done.stdout)] == [{"host", "facts", "notes"}] * 2
    assert "all ranks reach each other" in done.stderr


def test_json_holds_what_the_table_and_the_notes_say(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["info", "--json"])
    before = facts()
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("bagua.info", run_name="__main__")
    assert ended.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    # What is free of the memory changes while other tests run.
    lasting = {name: value for name, value in facts().items() if value == before[name]}
    assert printed["facts"].keys() == before.keys()
    assert {name: printed["facts"][name] for name in lasting} == lasting
    assert printed["notes"] == [*advice(printed["facts"])]


def test_ranks_that_do_not_reach_each_other_say_so_and_fail(tmp_path: Path) -> None:
    env = {"BAGUA_SOCKET_IFNAME": "nosuch0", "BAGUA_SHARED_MEMORY": "0"}
    script = "import runpy; runpy.run_module('bagua.info', run_name='__main__')"
    first, _ = run_script(script, 2, tmp_path, "--timeout", "60", env=env, codes=[1, 1])
    assert "the ranks cannot communicate" in first.output
    assert "no network interface 'nosuch0' is up" in first.output


def test_help_says_what_it_does(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["info", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("bagua.info", run_name="__main__")
    assert ended.value.code == 0
    assert "what is missing with the remedy" in capsys.readouterr().out
