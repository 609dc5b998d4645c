# SPDX-License-Identifier: Apache-2.0
"""Meetings of bagua.elastic: whoever dies, is cut off or differs, those who go on are one group, and nobody else is."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from bagua import _meeting_store, _meetings
from bagua._meeting_store import BEAT, Beats, beat_key
from bagua._meetings import Meetings
from bagua._pulse import Sign
from holdings import wait_for

PATIENCE = 1.0
# As long as a host takes that does not answer.
SILENCE = 2.0
_asking = threading.local()


class _World:
    """Who lives and who reaches whom; each process is a thread with a connection to the store of its own."""

    def __init__(self, server: dist.TCPStore) -> None:
        self.port = server.port
        self.ended: set[str] = set()
        self.stopped: set[str] = set()
        # How many seconds it takes to see that a host does not answer.
        self.silence = 0.0
        # What the first sees of the second.
        self.seen: dict[tuple[str, str], Sign] = {}
        self._pool = ThreadPoolExecutor(16)
        # Those who still wait for others then give up.
        self.is_over = threading.Event()
        self._counters: list[threading.Thread] = []

    def sign(self, one: str, of: str) -> Sign:
        if of in self.ended:
            return Sign.ENDED
        return self.seen.get((one, of), Sign.LIVES)

    def cut(self, one: str, other: str, sign: Sign) -> None:
        self.seen[one, other] = self.seen[other, one] = sign

    def stop(self, process: "_Process") -> None:
        """Stop one that has come. What it has asked before is still answered."""
        self.stopped.add(process.name)
        assert process.is_held.wait(10)

    def process(self, name: str, **options: Any) -> "_Process":
        return _Process(self, name, **options)

    def start(self, call: Callable[[], Any]) -> Future[Any]:
        return self._pool.submit(call)

    def count(self, name: str) -> None:
        def run() -> None:
            store = dist.PrefixStore("bagua_elastic", self.store())
            while not self.is_over.wait(BEAT) and name not in self.ended:
                if name not in self.stopped:
                    store.add(beat_key(name), 1)

        self._counters.append(threading.Thread(target=run))
        self._counters[-1].start()

    def store(self) -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", self.port, timeout=timedelta(seconds=20))

    def end(self) -> None:
        self.is_over.set()
        for counter in self._counters:
            counter.join()
        self.stopped.clear()
        self._pool.shutdown(cancel_futures=True)


class _Process:
    def __init__(self, world: _World, name: str, at_least: int = 1) -> None:
        self.name = f"1:bagua:0:0:0:{name}"
        self._world = world
        self.is_held = threading.Event()
        self.meetings = Meetings(
            world.store(), self.name, at_least, timedelta(seconds=PATIENCE), limit=timedelta(seconds=10)
        )
        self._counts()

    def finds_the_store_anew(self) -> None:
        """Go on with a store that is served at another place."""
        self.meetings.store = type(self.meetings.store)(self._world.store())
        self._counts()

    def _counts(self) -> None:
        ask = self.meetings.store.ask

        def ask_unless_stopped(question: Any, limit: timedelta) -> Any:
            while self.name in self._world.stopped:
                self.is_held.set()
                time.sleep(0.01)
            if self._world.is_over.is_set():
                raise RuntimeError("the test has ended")
            return ask(question, limit)

        self.meetings.store.ask = ask_unless_stopped  # type: ignore[method-assign]
        self._world.count(self.name)

    def comes(self, contract: str = "a model", unreached: tuple[str, ...] = ()) -> Future[Any]:
        def meet() -> list[str]:
            _asking.name = self.name
            return self.meetings.meet(["something", contract], unreached)[1]

        return self._world.start(meet)


class _Feeler:
    """In the place of connections: what the world says."""

    world: _World

    def __init__(self) -> None:
        self._name = _asking.name

    def signs(self, members: Any) -> dict[str, Sign]:
        seen = {member: self.world.sign(self._name, member) for member in members}
        if Sign.SILENT in seen.values():
            time.sleep(self.world.silence)
        return seen

    def __enter__(self) -> "_Feeler":
        return self

    def __exit__(self, *exception: object) -> None:
        pass


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[_World]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _Feeler.world = _World(server)
    monkeypatch.setattr(_meetings, "Feeler", _Feeler)
    yield _Feeler.world
    _Feeler.world.end()


def _members(world: _World, *names: str) -> list[_Process]:
    """Return processes that are members together."""
    processes = [world.process(name, at_least=len(names)) for name in names]
    coming = [process.comes() for process in processes]
    agreed = [sorted(one.result(10)) for one in coming]
    assert agreed == [sorted(process.name for process in processes)] * len(names)
    for process in processes:
        process.meetings.at_least = 1
    return processes


def test_those_who_live_go_on_at_once_when_one_has_died(world: _World) -> None:
    a, b, c = _members(world, "a", "b", "c")
    world.ended.add(c.name)
    begin = time.monotonic()
    coming = [a.comes(), b.comes()]
    assert [set(one.result(10)) for one in coming] == [{a.name, b.name}] * 2
    assert time.monotonic() - begin < PATIENCE


def test_a_silent_host_that_does_not_count_is_dead(world: _World) -> None:
    a, b, c = _members(world, "a", "b", "c")
    world.ended.add(c.name)
    world.silence = SILENCE
    world.sign = lambda _, of: Sign.SILENT if of == c.name else Sign.LIVES  # type: ignore[method-assign]
    coming = [a.comes()]
    # The second one comes while the first one waits for an answer of the silent host.
    time.sleep(SILENCE / 4)
    coming.append(b.comes())
    assert [set(one.result(10)) for one in coming] == [{a.name, b.name}] * 2


def test_one_that_is_stopped_is_waited_for_and_joins_later(world: _World) -> None:
    a, b = _members(world, "a", "b")
    world.stopped.add(b.name)
    begin = time.monotonic()
    assert a.comes().result(10) == [a.name]
    assert PATIENCE <= time.monotonic() - begin < PATIENCE + 3
    world.stopped.discard(b.name)
    again = b.comes()
    assert wait_for(a.meetings.is_needed)
    assert [one.result(10) for one in (a.comes(), again)] == [[a.name, b.name]] * 2


def test_one_that_comes_counts_though_its_next_beat_is_still_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, store, seen = SimpleNamespace(now=0.0), dist.HashStore(), Beats()
    monkeypatch.setattr(_meeting_store, "time", SimpleNamespace(monotonic=lambda: clock.now))
    for clock.now, is_counting in ((0.0, None), (1.5, False)):
        assert seen.is_counting(store, "a") is is_counting
    meetings = Meetings(store, "a", 1, timedelta(seconds=PATIENCE), limit=timedelta(seconds=10))
    meetings.come(store, _meetings._Came("a", "", [], 1), "a model")
    assert seen.is_counting(store, "a")
    meetings.store.close()


@pytest.mark.parametrize("sign", [Sign.SILENT, Sign.ENDED])
def test_of_two_members_that_do_not_reach_each_other_one_goes_on_and_the_other_is_told(
    world: _World, sign: Sign
) -> None:
    a, b = _members(world, "a", "b")
    world.cut(a.name, b.name, sign)
    coming = {process.name: process.comes() for process in (a, b)}
    going_on: list[str] = []
    # The one that goes on meets the other one when that has come.
    while len(coming) == 2:
        for process in (a, b):
            if coming[process.name].done() and coming[process.name].exception() is None:
                going_on = coming[process.name].result()
                assert going_on == [process.name]
                if process.meetings.is_needed():
                    coming[process.name] = process.comes()
            elif coming[process.name].done():
                error = coming.pop(process.name).exception()
                assert isinstance(error, RuntimeError)
                assert "both reach the store" in str(error)
                assert "(a port 1)" in str(error)
                assert "(b port 1)" in str(error)
        time.sleep(0.01)
    (rest,) = coming.values()
    assert rest.result(10) == [*coming]


def test_one_who_reaches_only_some_members_leaves_the_others_together(world: _World) -> None:
    a, b, c = _members(world, "a", "b", "c")
    # As a's connection to both is well, who decides knows from b alone.
    world.cut(b.name, c.name, Sign.SILENT)
    order = [a.comes(), b.comes(unreached=(c.name,))]
    third = c.comes(unreached=(b.name,))
    results = {0: set(order[0].result(10))}
    assert len(results[0]) == 2
    assert a.name in results[0]
    refused = third if b.name in results[0] else order[1]
    with pytest.raises(RuntimeError, match="but not each other"):
        refused.result(10)


@pytest.mark.parametrize("sign", [Sign.SILENT, Sign.ENDED])
def test_a_newcomer_that_cannot_reach_the_members_does_not_train_alone(world: _World, sign: Sign) -> None:
    a, b = _members(world, "a", "b")
    newcomer = world.process("new")
    world.silence = SILENCE
    for member in (a, b):
        world.cut(newcomer.name, member.name, sign)
    coming = newcomer.comes()
    assert wait_for(a.meetings.is_needed)
    time.sleep(SILENCE)
    assert not coming.done()
    members = [a.comes(), b.comes()]
    with pytest.raises(RuntimeError, match=r"this process .new port 1. and a member .* but not each other"):
        coming.result(10)
    assert [set(one.result(10)) for one in members] == [{a.name, b.name}] * 2


def test_a_newcomer_with_another_contract_is_refused_and_may_come_again_with_that_of_the_members(world: _World) -> None:
    a, b = _members(world, "a", "b")
    # Who is refused is told so also where the others go on waiting; and they are enough, whatever a newcomer asks for.
    new = world.process("new", at_least=4)
    for member in (a, b):
        member.meetings.at_least = 3
    coming = new.comes("another model")
    assert wait_for(a.meetings.is_needed)
    members = [a.comes(), b.comes()]
    with pytest.raises(ValueError, match="They have a model; this one has another model"):
        coming.result(10)
    assert not any(one.done() for one in members)
    # The meeting goes on, and what it has been refused there holds no more.
    everybody = {a.name, b.name, new.name}
    assert [set(one.result(10)) for one in (*members, new.comes())] == [everybody] * 3


def test_a_newcomer_that_stops_when_it_has_come_holds_nobody(world: _World) -> None:
    a, b = _members(world, "a", "b")
    newcomer = world.process("new")
    newcomer.comes()
    assert wait_for(a.meetings.is_needed)
    world.stop(newcomer)
    begin = time.monotonic()
    assert [set(one.result(10)) for one in (a.comes(), b.comes())] == [{a.name, b.name}] * 2
    assert time.monotonic() - begin < 4


def test_a_member_that_stops_when_it_has_come_is_waited_for(world: _World) -> None:
    a, b, c = _members(world, "a", "b", "c")
    a.comes()
    assert wait_for(b.meetings.is_needed)
    world.stop(a)
    begin = time.monotonic()
    assert [set(one.result(10)) for one in (b.comes(), c.comes())] == [{b.name, c.name}] * 2
    assert PATIENCE <= time.monotonic() - begin < PATIENCE + 4


def test_a_cut_that_is_over_before_the_patience_is_refuses_nobody(world: _World) -> None:
    a, b = _members(world, "a", "b")
    world.cut(a.name, b.name, Sign.SILENT)
    coming = [a.comes(unreached=(b.name,)), b.comes(unreached=(a.name,))]
    time.sleep(PATIENCE / 4)
    world.seen.clear()
    assert [set(one.result(10)) for one in coming] == [{a.name, b.name}] * 2


def test_a_job_that_has_ended_altogether_does_not_keep_another_one_from_the_store(world: _World) -> None:
    for process in _members(world, "a", "b"):
        world.ended.add(process.name)
    new = world.process("new")
    assert new.comes("another model").result(10) == [new.name]


def test_a_store_served_anew_without_its_keys_does_not_part_members_and_newcomers(world: _World) -> None:
    a, b = _members(world, "a", "b")
    again = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world.port = again.port
    # One who comes before the members have noticed trains alone until they have.
    early = world.process("early")
    assert early.comes().result(10) == [early.name]
    for process in (a, b):
        process.finds_the_store_anew()
    assert a.meetings.is_needed()
    late = world.process("late")
    coming = [process.comes() for process in (a, b, late)]
    assert wait_for(early.meetings.is_needed)
    coming.append(early.comes())
    everybody = {process.name for process in (a, b, early, late)}
    assert [set(one.result(10)) for one in coming] == [everybody] * 4


def test_a_store_served_anew_learns_who_the_members_are(world: _World) -> None:
    (a,) = _members(world, "a")
    a.comes().result(10)
    again = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world.port = again.port
    a.finds_the_store_anew()
    assert not a.meetings.is_needed()
    late = world.process("late")
    coming = late.comes()
    assert wait_for(a.meetings.is_needed)
    assert [one.result(10) for one in (coming, a.comes())] == [[a.name, late.name]] * 2


def test_of_a_member_at_whom_nobody_has_looked_for_long_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    # The whole machine may have slept: its members have not counted meanwhile, and live.
    clock, store, beats = SimpleNamespace(now=0.0), dist.HashStore(), Beats()
    monkeypatch.setattr(_meeting_store, "time", SimpleNamespace(monotonic=lambda: clock.now))
    seen = []
    for clock.now, count in ((0.0, 1), (0.5, 1), (1.0, 0), (2.5, 0), (60.0, 0), (60.5, 1)):
        store.add(beat_key("a"), count)
        seen.append(beats.is_counting(store, "a"))
    assert seen == [None, True, True, False, None, True]


def test_a_store_is_asked_again_at_its_place_until_it_is_served_again() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = server.port
    asked = _meetings.MeetingStore(dist.TCPStore("127.0.0.1", port))
    asked.ask(lambda store: store.set("key", "one"), timedelta(seconds=1))
    del server
    with pytest.raises(RuntimeError, match="does not answer"):
        asked.ask(lambda store: store.get("key"), timedelta(seconds=1))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: asked.ask(lambda store: store.add("count", 1), timedelta(seconds=20)))
        time.sleep(1)
        server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        assert answer.result(20) == 1
    assert server.check(["bagua_elastic/count"])


def test_the_command_serves_a_store_at_the_port_that_it_prints() -> None:
    command = [sys.executable, "-m", "bagua.elastic", "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stdout is not None
            said, _, port = serving.stdout.readline().rpartition(" ")
            assert said == "serving a store at 127.0.0.1 port"
            store = dist.TCPStore("127.0.0.1", int(port))
            store.set("key", "value")
            assert store.get("key") == b"value"
        finally:
            serving.kill()
