# SPDX-License-Identifier: Apache-2.0
"""A job with a secret: who has it trains as without, and who has it not neither joins, nor reads, nor disturbs.

docs/security.md promises what is tested here; backend/security has the tests of its parts.
"""

import functools
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import bagua
import pytest
import torch
import torch.distributed as dist
from bagua import _fresh_store
from bagua._native import _C
from ranks import on_new_ranks, run_ranks
from reference import for_each
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.skipif(
    not Path(_C.__file__).with_name("libbagua_security.so").exists(),
    reason="bagua was built without the headers of OpenSSL 3: libssl-dev",
)
_SECRET = "a secret of a test, worth nothing"
_CERTIFICATES = Path(__file__).parents[1] / "support/certificates"
_TWO_HOSTS = {"BAGUA_HOST_ID": ["one", "other"]}
_PROTECTED = {**_TWO_HOSTS, "BAGUA_JOB_SECRET": _SECRET}
_CERTIFIED = {
    "BAGUA_TLS_CERTIFICATE": str(_CERTIFICATES / "rank.pem"),
    "BAGUA_TLS_KEY": str(_CERTIFICATES / "rank_key.pem"),
    "BAGUA_TLS_CA": str(_CERTIFICATES / "authority.pem"),
}


def _train(algorithm: str, besiege: bool) -> list[float]:
    return _losses(algorithm, _besiege() if besiege else [], makes_groups=True)


def _losses(algorithm: str, besiegers: list[subprocess.Popen[bytes]], makes_groups: bool) -> list[float]:
    """Train a small model until the besiegers are gone; return the first losses, to the bit."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.05)
    bagua.register_comm_hook(ddp, algorithm)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())
    losses: list[float] = []
    while len(losses) < 30 or not _are_gone(besiegers):
        loss = ddp(torch.randn(16, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if makes_groups and len(losses) % 10 == 0:
            # Who joins in the middle of it opens connections.
            group = dist.new_group(timeout=timedelta(seconds=60))
            dist.barrier(group)
            dist.destroy_process_group(group)
    return losses[:30]


def _are_gone(besiegers: list[subprocess.Popen[bytes]]) -> bool:
    """On all ranks."""
    is_over = torch.tensor([all(besieger.poll() is not None for besieger in besiegers)], dtype=torch.uint8)
    dist.all_reduce(is_over, dist.ReduceOp.MIN)
    if is_over.item() and any(besieger.returncode != 0 for besieger in besiegers):
        raise AssertionError("a besieger has failed: see what it has printed")
    return bool(is_over.item())


# What a stranger may do with a port: say nothing, nonsense, what a rank without a secret says, half a greeting or all
# of one.
_BESIEGER = """
import os, socket, ssl, sys
host, port = sys.argv[1].rsplit(":", 1)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
waiting = []
for number in range(int(sys.argv[2])):
    stranger = socket.create_connection((host, int(port)), timeout=60)
    kind = number % 5
    try:
        if kind == 1:
            stranger.sendall(os.urandom(500))
        elif kind == 2:
            stranger.sendall(b"BGWH" + bytes([1, 0]) + bytes(42) + os.urandom(100))
        elif kind == 3:
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            try:
                context.wrap_bio(incoming, outgoing).do_handshake()
            except ssl.SSLWantReadError:
                pass
            greeting = outgoing.read()
            stranger.sendall(greeting if number % 2 else greeting[: len(greeting) // 2])
    except OSError:
        pass  # Turned away already.
    waiting.append(stranger)
    if len(waiting) > 200:
        waiting.pop(0).close()
"""


def _own_address() -> str:
    (line,) = [line for line in _C.own_record().splitlines() if line.startswith("address=")]
    return line.split("@")[1]


def _besiege() -> list[subprocess.Popen[bytes]]:
    addresses: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(addresses, _own_address())
    count = str(10_000 // dist.get_world_size())
    return [subprocess.Popen([sys.executable, "-c", _BESIEGER, addresses[dist.get_rank() - 1], count])]


@functools.cache
def _plain() -> list[list[float]]:
    """The losses of both ranks without a secret."""
    return run_ranks(2, _train, "bytegrad", False, env=_TWO_HOSTS)


def test_a_training_with_a_secret_and_certificates_has_the_same_losses() -> None:
    plain, protected = (
        run_ranks(2, _train, "gradient_allreduce", False, env=env) for env in (_TWO_HOSTS, {**_PROTECTED, **_CERTIFIED})
    )
    assert protected == plain


def test_ten_thousand_strangers_do_not_disturb_a_training() -> None:
    assert run_ranks(2, _train, "bytegrad", True, env=_PROTECTED, timeout=300) == _plain()


# Whoever reaches the port of the store can write there.
_FORGER = """
import os, random, sys, time
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, timedelta(seconds=30))
first = {}
forge = [
    lambda key: store.set(key, os.urandom(len(store.get(key)))),
    lambda key: store.set(key, first[random.choice(list(first))]),
    lambda key: store.set(key, first[key]),
    store.delete_key,
]
end = time.monotonic() + 3
while time.monotonic() < end:
    for key in store.list_keys():
        if "/sealed/" in key or "/secrets/" in key:
            first.setdefault(key, store.get(key))
            random.choice(forge)(key)
assert len(first) >= 8, first
"""


def _train_beside_a_forger() -> list[float]:
    rank = dist.get_rank()
    limit = timedelta(seconds=60)
    server = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False) if rank == 0 else None
    ports = [server.port if server else 0]
    dist.broadcast_object_list(ports)
    dist.destroy_process_group()
    store = server or dist.TCPStore("127.0.0.1", ports[0], None, False, limit)
    dist.init_process_group("bagua", store=store, rank=rank, world_size=2, timeout=limit)
    dist.barrier()
    forgers = [subprocess.Popen([sys.executable, "-c", _FORGER, str(ports[0])])] if rank == 0 else []
    losses = _losses("bytegrad", forgers, makes_groups=False)
    dist.barrier()
    return losses


def test_what_is_forged_in_the_store_does_not_disturb_a_training() -> None:
    assert run_ranks(2, _train_beside_a_forger, env=_PROTECTED) == _plain()


def _join(store: str, timeout: float, ranks: list[int], late: Sequence[int] = ()) -> tuple[float, str | list[float]]:
    """Come with the environment that this rank has: how long it took, and a sum over the job, or the error.

    The processes of the numbers `late` come after the others have looked for one with another secret.
    """
    number = dist.get_rank()
    rank = ranks[number]
    dist.destroy_process_group()
    _fresh_store._LOOK = timedelta(seconds=1)
    if number in late:
        time.sleep(2.5)
    begin = time.monotonic()
    file = dist.FileStore(store, -1)  # type: ignore[attr-defined]
    limit = timedelta(seconds=timeout)
    try:
        dist.init_process_group("bagua", store=file, rank=rank, world_size=max(ranks) + 1, timeout=limit)
    except ValueError as error:
        return time.monotonic() - begin, str(error)
    tensor = torch.full((1000,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return time.monotonic() - begin, tensor.unique().tolist()


@pytest.mark.parametrize("theirs", ["another secret, of the same length", None], ids=["another", "none"])
def test_a_rank_with_another_secret_or_none_is_named_on_all_ranks(theirs: str | None, tmp_path: Path) -> None:
    env = {"BAGUA_JOB_SECRET": [_SECRET, theirs, _SECRET], "BAGUA_HOST_ID": ["a", "b", "c"]}
    results = run_ranks(3, _join, str(tmp_path / "store"), 6.0, [0, 1, 2], backend="gloo", env=env)
    for rank, (seconds, error) in enumerate(results):
        assert isinstance(error, str), f"rank {rank} was let in"
        assert "rank 1" in error
        assert "BAGUA_JOB_SECRET" in error
        assert ("no job secret" in error) == (theirs is None)
        assert _SECRET not in error
        assert seconds < 30


@pytest.mark.long
def test_a_rank_with_another_secret_is_not_waited_for_until_a_long_timeout(tmp_path: Path) -> None:
    env = {"BAGUA_JOB_SECRET": [_SECRET, "another secret, of the same length"], **_TWO_HOSTS}
    results = run_ranks(2, _join, str(tmp_path / "store"), 1800.0, [0, 1], backend="gloo", env=env)
    for seconds, error in results:
        assert isinstance(error, str), "was let in"
        assert "BAGUA_JOB_SECRET" in error
        assert 60 < seconds < 120


@pytest.mark.parametrize(
    "late",
    [(), pytest.param((0,), marks=pytest.mark.long), pytest.param((1,), marks=pytest.mark.long), (1, 2)],
    ids=["all at once", "rank 0 late", "rank 1 late", "a rank of each late"],
)
def test_jobs_with_different_secrets_do_not_meet_on_one_store(late: tuple[int, ...], tmp_path: Path) -> None:
    """Not even with the same keys, though torch's own part of making a group counts all that come."""
    env = {
        "BAGUA_JOB_SECRET": [_SECRET, _SECRET, "another job's secret", "another job's secret"],
        "BAGUA_HOST_ID": ["a", "b", "a", "b"],
    }
    ranks = run_ranks(4, _join, str(tmp_path / "store"), 60.0, [0, 1, 0, 1], late, backend="gloo", env=env)
    assert [found for _, found in ranks] == [[3.0]] * 4


def test_a_certificate_without_a_secret_is_refused_when_a_group_is_made(tmp_path: Path) -> None:
    ((_, error),) = run_ranks(1, _join, str(tmp_path / "store"), 10.0, [0], backend="gloo", env=_CERTIFIED)
    assert "BAGUA_TLS_CERTIFICATE needs BAGUA_JOB_SECRET" in str(error)


@pytest.mark.parametrize("odd", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_that_cannot_use_its_secret_ends_the_wait_of_the_others(odd: int, tmp_path: Path) -> None:
    secrets_of_ranks = [_SECRET, _SECRET, _SECRET]
    secrets_of_ranks[odd] = ""
    env = {"BAGUA_JOB_SECRET": secrets_of_ranks, "BAGUA_HOST_ID": ["a", "b", "c"]}
    results = run_ranks(3, _join, str(tmp_path / "store"), 10.0, [0, 1, 2], backend="gloo", env=env)
    for rank, (seconds, error) in enumerate(results):
        assert isinstance(error, str), f"rank {rank} was let in"
        expected = "BAGUA_JOB_SECRET is set, but empty" if rank == odd else f"rank {odd} one that it cannot use"
        assert expected in error
        assert seconds < 30


SO_RCVBUFFORCE = 33  # Python has no name for it
_MARK = 0x6E67_7561  # as a float, a number that no other memory holds by chance


def _send_marks() -> None:
    marked = torch.full((4096,), _MARK, dtype=torch.int32)
    for _ in range(3):
        gathered = [torch.empty_like(marked) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, marked)
        dist.broadcast(marked, 0)
    if dist.get_rank() == 0:
        dist.send(marked, 1)
    else:
        dist.recv(marked, 0)


def _bytes_with_marks(env: dict[str, Any]) -> tuple[int, int]:
    """How many bytes passed on the network while ranks sent marks, and how many packets had some of them."""
    pattern = torch.full((16,), _MARK, dtype=torch.int32).numpy().tobytes()
    seen = found = 0
    end = float("inf")

    def listen() -> None:
        # All the time: other tests are heard too, and what does not fit into the buffer is lost.
        nonlocal seen, found
        while time.monotonic() < end:
            try:
                packet = network.recv(1 << 17)
            except TimeoutError:
                continue
            seen += len(packet)
            found += pattern in packet

    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3)) as network:
        network.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 256 << 20)
        network.bind(("lo", 0))
        network.settimeout(0.2)
        listener = threading.Thread(target=listen)
        listener.start()
        try:
            run_ranks(2, _send_marks, env={**_TWO_HOSTS, "MASTER_ADDR": "127.0.0.1", **env})
        finally:
            end = time.monotonic() + 1  # for what is in the buffer
            listener.join()
    return seen, found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can see what passes on a network")
def test_nothing_can_be_read_on_the_network() -> None:
    _, plain = _bytes_with_marks({})
    assert plain > 0, "these packets are not seen at all"
    for certificates in ({}, _CERTIFIED):
        seen, found = _bytes_with_marks({**certificates, "BAGUA_JOB_SECRET": _SECRET})
        assert seen > 4096 * 4 * 7, "less was seen than was sent"
        assert found == 0


UNFIT: list[tuple[dict[str, str], str]] = [
    ({"BAGUA_JOB_SECRET": ""}, "BAGUA_JOB_SECRET is set, but empty: the job would run unprotected"),
    ({"BAGUA_JOB_SECRET_FILE": ""}, "BAGUA_JOB_SECRET_FILE is set, but empty"),
    ({"BAGUA_JOB_SECRET": "short"}, "16 characters or more, got 5"),
    ({"BAGUA_JOB_SECRET": _SECRET, "BAGUA_JOB_SECRET_FILE": "/dev/null"}, "are both set"),
    ({"BAGUA_JOB_SECRET_FILE": "/nowhere/secret"}, "'/nowhere/secret': No such file"),
    ({"BAGUA_JOB_SECRET": _SECRET, "BAGUA_TLS_CERTIFICATE": "a.pem"}, "BAGUA_TLS_KEY is not"),
]


@on_new_ranks(1, backend="gloo")  # in which nobody has read the settings
@for_each(UNFIT)
def test_what_cannot_protect_a_job_is_refused(case: tuple[dict[str, str], str]) -> None:
    env, expected = case
    with mock.patch.dict(os.environ, env), pytest.raises(ValueError, match=expected) as refused:
        _C.job_secret_fingerprint()
    assert _SECRET not in str(refused.value)


def test_the_secret_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{_SECRET}\n")
    env = {"BAGUA_JOB_SECRET": [None, _SECRET], "BAGUA_JOB_SECRET_FILE": [str(file), None], **_TWO_HOSTS}
    ranks = run_ranks(2, _join, str(tmp_path / "store"), 60.0, [0, 1], backend="gloo", env=env)
    assert [found for _, found in ranks] == [[3.0]] * 2


@on_new_ranks(2, env={**_PROTECTED, "BAGUA_NCCL_NET": "0"})
def test_nccl_between_hosts_is_refused_over_its_own_sockets() -> None:
    group: Any = dist.group.WORLD
    with pytest.raises(ValueError, match=r"NCCL, with BAGUA_NCCL_NET=0, would send .* unset BAGUA_JOB_SECRET on all"):
        group._get_backend(torch.device("cpu")).eager_connect_single_device(torch.device("cuda:0"))


@on_new_ranks(2, backend="gloo", env=_PROTECTED)
def test_a_hook_on_a_stock_group_takes_a_protected_one() -> None:
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    handle = bagua.register_comm_hook(ddp, "bytegrad")
    ddp(torch.ones(2, 2)).sum().backward()
    assert handle.stats()["wire_bytes_between_hosts"] > 0


def _places_of_the_secret() -> int:
    """In the memory of this process that it may write to."""
    dist.all_reduce(torch.ones(10))
    pattern = re.compile(rb"drawn-for-this-test-[0-9a-f]{32}")
    found = 0
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        for line in Path("/proc/self/maps").read_text().splitlines():
            bounds, permissions, *_ = line.split()
            begin, end = (int(bound, 16) for bound in bounds.split("-"))
            if permissions.startswith("rw") and "[v" not in line:
                memory.seek(begin)
                found += len(pattern.findall(memory.read(end - begin)))
    return found


def test_a_secret_from_a_file_stays_nowhere(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("drawn-for-this-test-" + secrets.token_hex(16))
    assert run_ranks(2, _places_of_the_secret, env={**_TWO_HOSTS, "BAGUA_JOB_SECRET_FILE": str(file)}) == [0, 0]
