# SPDX-License-Identifier: Apache-2.0
"""`register_comm_hook(manager=)`: an algorithm on stock DDP where a Manager, as torchft's, decides who takes part."""

from typing import Any

import bagua
import pytest
import torch
import torch.distributed as dist
from members import HOOKS, Members, model
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel as DDP
from trouble import TRANSPORTS, die

SIZE = 3
LAST = SIZE - 1
pytestmark = pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has reconfigure from 2.14 on")


class _Manager:
    """Does what is said beforehand; has the methods of torchft's that a hook needs, with its meanings."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._quorum: tuple[int, ...] = ()
        self._participants = 0
        self.is_healing = False
        self.reported: list[Exception] = []
        self.waits = 0

    def start_quorum(self, *who: int, healing: tuple[int, ...] = ()) -> None:
        self.reported = []
        self._quorum, self._participants = who, len(who) - len(healing)
        self.is_healing = self._members.me in healing

    def wait_quorum(self) -> None:
        self.waits += 1
        if self._quorum:
            self._members.become(*self._quorum)
        self._quorum = ()

    def num_participants(self) -> int:
        return self._participants

    def is_participating(self) -> bool:
        return not self.is_healing

    def errored(self) -> Exception | None:
        return self.reported[0] if self.reported else None

    def report_error(self, e: Exception) -> None:
        self.reported.append(e)


def _gradients(ddp: DDP, number: int) -> torch.Tensor:
    ddp.zero_grad()
    ddp(torch.full((4, 8), float(number))).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])


def _under_a_manager(algorithm: str) -> dict[str, Any]:
    members = Members()
    members.become(members.me)
    manager = _Manager(members)
    ddp = DDP(model(), bucket_cap_mb=0.001)
    bagua.register_comm_hook(ddp, algorithm, manager=manager, **HOOKS[algorithm])
    manager.start_quorum(0, 1, 2)
    everybody = _gradients(ddp, 1)
    assert (manager.waits, manager.reported) == (1, [])
    manager.start_quorum(0, 1, 2, healing=(1,))
    healed = _gradients(ddp, 1)
    members.wait_for_all("no bucket is on its way")
    if members.me == LAST:
        die(members.shared)
    manager.start_quorum()
    manager._participants = SIZE
    failed = _gradients(ddp, 1)
    reported = len(manager.reported)
    manager.start_quorum(1, 0)
    return {
        "everybody": everybody,
        "healed": healed,
        "reported": reported,
        "is_finite": bool(failed.isfinite().all()),
        "after": _gradients(ddp, 1),
        "reported_after": manager.reported,
    }


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_errors_are_reported_and_the_mean_is_over_those_who_take_part(algorithm: str) -> None:
    results = run_ranks(SIZE, _under_a_manager, algorithm, env=TRANSPORTS["between-hosts"], dying={LAST})
    first, second = results[:2]
    for name in ("everybody", "healed", "after"):
        assert torch.equal(first[name], second[name])
    # All have the same gradients, so that any mean is that of one; with a zero among three it would be two thirds.
    error = 0.05 if algorithm == "bytegrad" else 1e-5
    for name in ("healed", "after"):
        torch.testing.assert_close(first[name], first["everybody"], rtol=error, atol=error)
    for result in (first, second):
        assert result["reported"] >= 1
        assert result["is_finite"]
        assert result["reported_after"] == []


def _refused() -> None:
    members = Members()
    members.become(members.me)
    manager = _Manager(members)
    ddp = DDP(model())
    with pytest.raises(ValueError, match="'local_sgd' acts on what the optimizer does"):
        bagua.register_comm_hook(ddp, "local_sgd", torch.optim.SGD(ddp.parameters(), 0.1), manager=manager)
    members.become(0, 1)
    with pytest.raises(ValueError, match="alone until the manager brings the replicas together"):
        bagua.register_comm_hook(ddp, "bytegrad", manager=manager)


def test_what_cannot_work_under_a_manager_is_refused() -> None:
    run_ranks(2, _refused)
