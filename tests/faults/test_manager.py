# SPDX-License-Identifier: Apache-2.0
"""`register_comm_hook(manager=)`: an algorithm on stock DDP where a Manager, as torchft's, decides who takes part."""

import threading
import time
from datetime import timedelta
from types import MappingProxyType
from typing import Any
from unittest import mock

import bagua
import pytest
import torch
import torch.distributed as dist
from bagua._managed import ManagedHook
from members import HOOKS, Members, model
from ranks import on_new_ranks, run_ranks
from torch.nn.parallel import DistributedDataParallel as DDP
from trouble import SLACK_SECONDS, TRANSPORTS, die

SIZE = 3
LAST = SIZE - 1
pytestmark = pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has reconfigure from 2.14 on")


class _Manager:
    """Does what is said beforehand; has the methods of torchft's that a hook needs, with its meanings."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self.seconds = 60.0  # until an operation is over
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

    def wrap_future(self, fut: torch.futures.Future[Any], default: Any) -> torch.futures.Future[Any]:
        wrapped: torch.futures.Future[Any] = torch.futures.Future()
        lock = threading.Lock()

        def end(error: Exception | None) -> None:
            with lock:
                if wrapped.done():
                    return
                if error is not None:
                    self.report_error(error)
                wrapped.set_result(default)

        def end_with(ended: torch.futures.Future[Any]) -> None:
            timer.cancel()
            try:
                ended.value()
            except Exception as error:
                end(error)
            else:
                end(None)

        timer = threading.Timer(self.seconds, end, [TimeoutError("the manager's time is over")])
        timer.start()
        fut.add_done_callback(end_with)
        return wrapped


def _gradients(ddp: DDP, number: int) -> torch.Tensor:
    ddp.zero_grad()
    ddp(torch.full((4, 8), float(number))).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])


def _trained_by_all(algorithm: str = "bytegrad", size: int = SIZE) -> tuple[Members, _Manager, DDP, torch.Tensor]:
    """Return them after a step of so many members, and the gradients of that step."""
    members = Members()
    manager = _Manager(members)
    ddp = DDP(model(), bucket_cap_mb=0.001)
    bagua.register_comm_hook(ddp, algorithm, manager=manager, **HOOKS[algorithm])
    manager.start_quorum(*range(size))
    return members, manager, ddp, _gradients(ddp, 1)


def _under_a_manager(algorithm: str) -> dict[str, Any]:
    members, manager, ddp, everybody = _trained_by_all(algorithm)
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


def _one_is_late(has_changed: bool) -> dict[str, Any]:
    # The first step, which makes connections, has longer: where it fails, the second one would fail without a wait.
    members, manager, ddp, _ = _trained_by_all()
    manager.seconds = 3.0
    manager.start_quorum(*((1, 2, 0) if has_changed else ()))
    manager._participants = SIZE
    if members.me == LAST:
        manager.wait_quorum()
        while members.shared.add("has given up", 0) < SIZE - 1:
            time.sleep(0.01)
    began = time.monotonic()
    _gradients(ddp, 2)
    took = time.monotonic() - began
    reported = [str(error) for error in manager.reported]
    members.shared.add("has given up", 1)
    manager.start_quorum(2, 0, 1)
    return {"took": took, "reported": reported, "after": _gradients(ddp, 3), "reported_after": manager.reported}


@pytest.mark.parametrize("has_changed", [False, True])
def test_a_replica_that_is_late_is_waited_for_no_longer_than_the_manager_says(has_changed: bool) -> None:
    # The group's own timeout is 30 s. Where members have changed, the first wait is for their agreement.
    results = run_ranks(SIZE, _one_is_late, has_changed, env=TRANSPORTS["between-hosts"])
    for result in results:
        assert result["reported"]
        assert result["took"] < 3.0 + SLACK_SECONDS
        assert result["reported_after"] == []
        assert torch.equal(result["after"], results[0]["after"])
    assert any("the manager's time is over" in text for result in results for text in result["reported"])


@on_new_ranks(SIZE, env=TRANSPORTS["between-hosts"])
def test_a_replica_that_leaves_a_step_out_tells_those_who_wait_for_it() -> None:
    members, manager, ddp, _ = _trained_by_all()
    manager.start_quorum()
    manager._participants = SIZE
    if members.me == LAST:
        manager.report_error(RuntimeError("the state of the others did not come"))
    began = time.monotonic()
    _gradients(ddp, 2)
    assert time.monotonic() - began < SLACK_SECONDS
    assert manager.reported


@on_new_ranks(2, env=TRANSPORTS["between-hosts"])
def test_the_backward_goes_on_while_buckets_travel() -> None:
    members, manager, ddp, _ = _trained_by_all(size=2)
    if members.me == 0:
        # The other one has given nothing yet: this one's first bucket, of the last layers, is on its way.
        ddp.module[0].register_forward_hook(
            lambda _module, _inputs, output: output.register_hook(lambda _: members.shared.set("is there", "")) and None
        )
    else:
        members.shared.wait(["is there"], timedelta(seconds=20))
    _gradients(ddp, 2)
    assert manager.reported == []


def test_a_failed_bucket_goes_back_when_nothing_can_write_into_it_any_more() -> None:
    gradients = torch.ones(3)
    future: torch.futures.Future[Any] = torch.futures.Future()
    events: list[str] = []

    class Everything:
        """Hook, group, manager and bucket at once."""

        options = MappingProxyType({"average": True})

        def buffer(self) -> torch.Tensor:
            return gradients

        def index(self) -> int:
            return 1

        def errored(self) -> None:
            return None

        def is_participating(self) -> bool:
            return True

        def num_participants(self) -> int:
            return 2

        def size(self) -> int:
            return 2

        def run(self, bucket: Any) -> torch.futures.Future[Any]:
            return future

        def wrap_future(self, fut: torch.futures.Future[Any], default: Any) -> torch.futures.Future[Any]:
            fut.add_done_callback(lambda _: events.append("reported"))
            return torch.futures.Future()

        def abort(self) -> None:
            events.append("aborted")

        def wait_for_programs(self, limit: timedelta) -> bool:
            assert not result.done()
            events.append("waited")
            return True

    everything: Any = Everything()
    result = ManagedHook(everything, everything, everything).run(everything)
    future.set_exception(RuntimeError("a replica has died"))
    assert events == ["reported", "aborted", "waited"]
    assert result.done()
    assert result.value() is gradients


@pytest.mark.parametrize(("average", "expected"), [(True, 1.5), (False, 1.0)])
def test_a_sum_is_not_made_greater_for_those_who_heal(average: bool, expected: float) -> None:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result([torch.ones(3)])
    # One object stands for hook, group, manager and bucket.
    everything = mock.MagicMock(options={"average": average})
    everything.errored.return_value = None
    everything.wrap_future.side_effect = lambda ended, default: ended
    everything.size.return_value, everything.num_participants.return_value = 3, 2
    everything.run.return_value = future
    result = ManagedHook(everything, everything, everything).run(everything)
    assert result.value().tolist() == [expected] * 3


@on_new_ranks(2)
def test_what_cannot_work_under_a_manager_is_refused() -> None:
    alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    manager: Any = object()
    with pytest.raises(ValueError, match="needs a group of backend 'bagua'"):
        bagua.register_comm_hook(DDP(model(), process_group=alone), "bytegrad", manager=manager)
    members = Members()
    members.become(members.me)
    manager = _Manager(members)
    network = model()
    network.register_buffer("statistics", torch.ones(3))
    ddp = DDP(network)
    with pytest.raises(ValueError, match="'bytegrad' has no option 'levels'"):
        bagua.register_comm_hook(ddp, "bytegrad", manager=manager, levels=3)
    with pytest.raises(ValueError, match="'local_sgd' acts on what the optimizer does"):
        bagua.register_comm_hook(ddp, "local_sgd", torch.optim.SGD(ddp.parameters(), 0.1), manager=manager)
    with pytest.raises(ValueError, match="does not work with find_unused_parameters=True"):
        bagua.register_comm_hook(DDP(model(), find_unused_parameters=True), "bytegrad", manager=manager)
    network = model()
    delayed = DDP(
        network,
        delay_all_reduce_named_params=[("0.bias", network[0].bias)],
        param_to_hook_all_reduce=network[0].weight,
    )
    with pytest.raises(ValueError, match="delay_all_reduce_named_params does not work"):
        bagua.register_comm_hook(delayed, "bytegrad", manager=manager)
    assert delayed.broadcast_buffers
    members.become(0, 1)
    with pytest.raises(ValueError, match="alone until the manager brings the replicas together"):
        bagua.register_comm_hook(ddp, "bytegrad", manager=manager)
    assert ddp.broadcast_buffers
    members.become(members.me)
    for parameter in ddp.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    bagua.register_comm_hook(ddp, "bytegrad", manager=manager)
    assert all(bool((parameter.grad == 3).all()) for parameter in ddp.parameters()), "of a step that has begun"
