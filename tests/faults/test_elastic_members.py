# SPDX-License-Identifier: Apache-2.0
"""bagua.elastic: a training goes on when members die, and those that join take over what it has come to."""

import collections
import contextlib
import io
import os
import pickle
import random
import re
import runpy
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import bagua
import pytest
import torch
import torch.distributed as dist
from bagua._tensors_apart import with_tensors, without_tensors
from bagua.elastic import heal
from elastic_ranks import backward, join, weights_of
from holdings import holdings, wait_for
from members import HOOKS, Members, model
from ranks import on_new_ranks, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from trouble import TAKES_ALL, die, store

pytestmark = pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has reconfigure from 2.14 on")
# So many are at work, once those who have died are replaced.
SIZE = 3


def _die_when_told(me: int, shared: dist.Store, seed: int) -> None:
    moment = random.Random(seed + me).uniform(0, 0.2)
    while not shared.check([f"die/{me}"]):
        time.sleep(0.01)
    time.sleep(moment)
    os.kill(os.getpid(), signal.SIGKILL)


class _Killer:
    """Rank 0's: one after another dies, and another one comes in its place."""

    def __init__(self, shared: dist.Store, deaths: int) -> None:
        self._shared = shared
        self._deaths = deaths
        self._victim = 1
        self._is_dying = False
        self.held: list[list[int]] = []

    def look(self, step: int) -> None:
        size = dist.get_world_size()
        if size == SIZE and not self._is_dying and self._victim <= self._deaths:
            self.held.append(_counts())
            self._shared.set(f"die/{self._victim}", "")
            self._is_dying = True
        elif size < SIZE and self._is_dying:
            self._shared.set(f"start/{self._victim + SIZE - 1}", "")
            self._is_dying = False
            self._victim += 1
        elif size == SIZE and self._victim > self._deaths and not self._shared.check(["stop"]):
            self._shared.set("stop", str(step + 20))


def _train(algorithm: str, deaths: int, seed: int) -> dict[str, Any]:
    me, shared, members = join(at_least=2)
    if me >= SIZE:
        assert wait_for(lambda: shared.check([f"start/{me}"]), 1000)
    threading.Thread(target=_die_when_told, args=(me, shared, seed), daemon=True).start()
    killer = _Killer(shared, deaths) if me == 0 else None
    with members:
        network = model(seed=me)
        if algorithm == "qadam":
            optimizer: torch.optim.Optimizer = bagua.QAdamOptimizer(network.parameters(), 0.01, 2, eps=0.1)
        else:
            optimizer = torch.optim.AdamW(network.parameters(), 0.01)
        training = members.train(DDP(network), optimizer, algorithm, **HOOKS[algorithm])
        joined_at = training.step
        while not (shared.check(["stop"]) and training.step >= int(shared.get("stop"))):
            with training.attempt():
                optimizer.zero_grad()
                backward(training)
                optimizer.step()
                time.sleep(0.01)
            if killer is not None:
                killer.look(training.step)
        training.wait_for_end()
        training.handle.synchronize()
        moments = torch.cat([optimizer.state[p]["exp_avg"].flatten() for p in network.parameters()])
        state = {"weights": weights_of(training), "moments": moments, "step": training.step, "joined_at": joined_at}
        if killer is not None:
            is_as_before = wait_for(lambda: _is_no_more_than(killer.held[:4]))
            state["grown"] = [] if is_as_before else [killer.held, *holdings()]
        return state


def _counts() -> list[int]:
    """Count threads, files, ports, segments and mappings."""
    threads, *others = holdings()
    # A group between hosts has up to sixteen of these, which start when they are needed; a background group has one.
    communicating = max(17, threads.count("bagua_comm"))
    return [communicating + sum(name != "bagua_comm" for name in threads), *map(len, others)]


def _is_no_more_than(before: list[list[int]]) -> bool:
    """Whether there is no more than there ever was at the first deaths: connections come and go with what is sent."""
    # One, and the thread of one, may come late; what each death leaves behind would be more.
    most = [max(counts) for counts in zip(*before, strict=True)]
    return all(now <= then + 2 for now, then in zip(_counts(), most, strict=True))


def _go_through(algorithm: str, deaths: int, transport: str) -> list[dict[str, Any]]:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    ranks = SIZE + deaths
    env = {"BAGUA_HOST_ID": [f"host-{rank}" for rank in range(ranks)]} if transport == "between-hosts" else {}
    dying = set(range(1, deaths + 1))
    results = run_ranks(ranks, _train, algorithm, deaths, seed, env=env, dying=dying, timeout=60.0 + 20.0 * deaths)
    return [result for result in results if result is not None]


@pytest.mark.parametrize(
    ("algorithm", "deaths", "transport"),
    [
        ("bytegrad", 3, "between-hosts"),
        pytest.param("quantized_allreduce", 4, "in-host", marks=pytest.mark.long),
        *(
            pytest.param(name, deaths, "between-hosts", marks=[pytest.mark.long, pytest.mark.timeout(1800)])
            for name in HOOKS
            if name != "async"  # its ranks take different steps
            for deaths in ([50] if TAKES_ALL or name == "bytegrad" else [4])
        ),
    ],
)
def test_deaths_at_random_moments_and_newcomers_leave_equal_weights_and_nothing_else(
    algorithm: str, deaths: int, transport: str
) -> None:
    first, *others = _go_through(algorithm, deaths, transport)
    assert len(others) == SIZE - 1
    for other in others:
        assert torch.equal(other["weights"], first["weights"])
        assert torch.equal(other["moments"], first["moments"]) or not bagua.describe(algorithm)["is_exact"]
        assert other["step"] == first["step"]
        assert other["joined_at"] > 0
    assert first["grown"] == [], str(first["grown"])


class _Own(torch.optim.Optimizer):
    """Keeps more digits than the weights have, and a number that is no tensor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(exact=p.float(), count=0)
                state["exact"] -= group["lr"] * p.grad.float() * 1.001
                state["count"] += 1
                p.copy_(state["exact"])


def _heal() -> tuple[list[Tensor], dict[str, Any], Any, int]:
    changing = Members()
    changing.become(changing.me)
    torch.manual_seed(changing.me)
    network = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).bfloat16()
    network.register_buffer("unsaved", torch.rand(3), persistent=False)
    ddp = DDP(network)
    optimizer = _Own(network.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    handle = bagua.register_comm_hook(ddp, "gradient_allreduce")
    steps = 0 if changing.me == 1 else 3
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(4, 8).bfloat16()).square().mean().backward()
        optimizer.step()
        schedule.step()
    changing.become(1, 0)
    steps = heal(ddp, optimizer, handle, [schedule], step=steps)
    tensors = [*network.state_dict().values(), network.unsaved]
    states = [optimizer.state[p] for p in network.parameters()]
    assert all(state["exact"].dtype == torch.float32 for state in states)
    tensors += [state["exact"] for state in states]
    numbers = {"counts": [state["count"] for state in states], "lr": optimizer.param_groups[0]["lr"]}
    return tensors, numbers, schedule.state_dict(), steps


def test_healing_gives_all_that_a_rank_has_bit_for_bit() -> None:
    (first, numbers, schedule, steps), (others, *rest) = run_ranks(2, _heal)
    assert all(torch.equal(one, other) for one, other in zip(first, others, strict=True))
    assert rest == [numbers, schedule, steps]
    assert (steps, numbers["counts"][0], numbers["lr"]) == (3, 3, 0.5**4)


class _Pair(NamedTuple):
    tensor: Tensor
    number: int


class _Names(list[Any]):
    pass


def test_states_of_every_kind_come_back_as_they_were() -> None:
    one = torch.ones(2)
    several = collections.defaultdict(list, {"several": [one]})
    state = {
        "kinds": [_Pair(one, 3), collections.OrderedDict(x=one), several, _Names([one]), (one, "text"), one.shape],
        2: collections.deque([one], 4),
    }
    tensors: list[Tensor] = []
    skeleton = pickle.loads(pickle.dumps(without_tensors(state, tensors)))
    result = with_tensors(skeleton, [tensor * 1 for tensor in tensors])
    assert [type(value) for value in result["kinds"]] == [type(value) for value in state["kinds"]]
    assert repr(result) == repr(state)
    assert len(tensors) == 5


@on_new_ranks(2)
def test_a_newcomer_with_another_model_is_refused_on_all_ranks() -> None:
    changing = Members()
    changing.become(changing.me)
    ddp = DDP(nn.Linear(8, 4 + changing.me))
    unsaved = nn.Linear(8, 4)
    unsaved.register_buffer("unsaved", torch.ones(1 + changing.me), persistent=False)
    other = DDP(unsaved)
    changing.become(0, 1)
    with pytest.raises(ValueError, match=r"(?s)cannot train together.*\[4, 8\].*\[5, 8\]"):
        heal(ddp, torch.optim.SGD(ddp.parameters(), 0.1), step=changing.me)
    with pytest.raises(ValueError, match=r"(?s)cannot train together.*unsaved: torch.float32\[1\].*\[2\]"):
        heal(other, torch.optim.SGD(other.parameters(), 0.1), step=changing.me)


_SCRIPT = Path(__file__).parents[2] / "examples" / "elastic.py"


def _run_the_example(port: int) -> str:
    """Return what it prints; the second process dies once it trains with the first, and then the third one comes."""
    me, shared = dist.get_rank(), store()
    dist.destroy_process_group()
    said = io.StringIO()

    def watch() -> None:
        # The one that stays may be the newcomer, which needs a few steps until it has all weights.
        assert wait_for(lambda: said.getvalue().count(": 2 members") >= 5, 60)
        shared.set("die", "")
        before = len(said.getvalue())
        assert wait_for(lambda: ": 1 members" in said.getvalue()[before:], 60)
        shared.set("come", "")

    def die_when_told() -> None:
        shared.wait(["die"], timedelta(seconds=100))
        die(shared)

    if me == 2:
        shared.wait(["come"], timedelta(seconds=100))
    with ThreadPoolExecutor(1) as pool, contextlib.redirect_stdout(said):
        watching = pool.submit([watch, die_when_told, lambda: None][me])
        with mock.patch.object(sys, "argv", [str(_SCRIPT), "127.0.0.1", str(port), "300"]):
            runpy.run_path(str(_SCRIPT), run_name="__main__")
        watching.result()
    return said.getvalue()


@pytest.mark.long
def test_the_example_goes_on_without_one_that_is_killed_and_with_one_that_comes() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stays, _, comes = run_ranks(3, _run_the_example, server.port, dying={1})
    assert ": 2 members" in comes
    ends = [re.findall(r"^weights (\S+)", text, re.M) for text in (stays, comes)]
    assert ends[0] == ends[1] != []
