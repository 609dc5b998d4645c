# SPDX-License-Identifier: Apache-2.0
"""The handle that register_comm_hook() returns: figures, checkpoints, removal; of every algorithm, at every moment."""

import copy
import io
import pickle
from collections.abc import Callable

import bagua
import pytest
import simulations as sim
import torch
import torch.distributed as dist
from hooked_models import emulated_hosts, everywhere, loss_of, perceptron, same_everywhere
from hooked_trainings import HOSTS, MOMENTS, SECONDS, Trained, hooked, train_step
from ranks import Pools, on_ranks
from reference import for_each, named
from test_with_bagua_backward import Outputs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.any_device

# As long as qadam warms up, and one more.
STEPS_BEFORE = 3


def _is_exact(algorithm: str) -> bool:
    return bool(bagua.describe(algorithm)["is_exact"])


def _runs_in_background(algorithm: str) -> bool:
    return bool(bagua.describe(algorithm)["runs_in_background"])


# --- each call at each moment ---


def _get_state(trained: Trained) -> None:
    state = trained.handle.state_dict()
    assert state["algorithm"] == trained.handle.algorithm
    assert state["options"] == trained.handle.options
    keeps_tensors = any(value.is_floating_point() for value in state["state"].values())
    assert (trained.handle.stats()["state_bytes"] > 0) == keeps_tensors


def _load_state(trained: Trained) -> None:
    state = trained.handle.state_dict()
    trained.handle.load_state_dict(state)
    more = {**state, "state": {**state["state"], "of_another.0": torch.zeros(1)}}
    with pytest.raises(ValueError, match="of_another"):
        trained.handle.load_state_dict(more)


def _look_at_stats(trained: Trained) -> None:
    stats = trained.handle.stats()
    assert stats["algorithm"] == trained.handle.algorithm
    assert stats.keys() == bagua.Stats.__annotations__.keys()
    # Where no gradients travel DDP may leave them out of its buckets.
    assert stats["steps"] >= 0
    assert stats["steps"] <= stats["buckets"] or stats["buckets"] == 0


CALLS: dict[str, Callable[[Trained], None]] = {
    "state_dict": _get_state,
    "load_state_dict": _load_state,
    "stats": _look_at_stats,
    "synchronize": lambda trained: trained.handle.synchronize(),
    "remove": lambda trained: trained.handle.remove(),
    "abort": lambda trained: trained.handle.abort(),
    "resume": lambda trained: trained.handle.resume(),
}


def _refusal(call: str, moment: str, algorithm: str) -> str:
    """What the error says, or nothing where there is to be none."""
    if call in ("abort", "resume") and not _runs_in_background(algorithm):
        return f"background.*'{algorithm}'"
    changes_weights = call == "abort" or (call in ("remove", "synchronize") and not _is_exact(algorithm))
    if changes_weights and moment == "between forward and backward":
        return "between a forward and its backward"
    return ""


def _call(call: str, moment: str, trained: Trained) -> bool:
    """Whether the call was carried out; where it has to be refused it is on every rank, or the test fails."""
    refusal = _refusal(call, moment, trained.handle.algorithm)
    if not refusal:
        CALLS[call](trained)
        return True
    with pytest.raises(RuntimeError, match=refusal):
        CALLS[call](trained)
    return False


def _mean_gradients(group: dist.ProcessGroup, ddp: DDP, number: int) -> list[Tensor]:
    """As plain averaging gives them, of the weights at hand."""
    local = torch.autograd.grad(loss_of(ddp.module, number), list(ddp.module.parameters()))
    return [torch.stack(everywhere(gradient, group)).mean(0) for gradient in local]


def _changes_nothing(call: str, moment: str, algorithm: str) -> bool:
    """Whether training goes on as if it had not been made, or is not told from that here."""
    return (
        bool(_refusal(call, moment, algorithm))
        or call in ("state_dict", "load_state_dict", "stats", "resume")
        or (call == "synchronize" and _is_exact(algorithm))
    )


def _train_around(plan: dict[str, list[str]], algorithm: str, group: dist.ProcessGroup) -> None:
    """Make the calls of each moment in one training: several only where they change nothing."""
    trained, done = hooked(algorithm, group), []
    moment, (call, *_) = next(iter(plan.items()))

    def at(now: str) -> None:
        done.extend(_call(name, now, trained) for name in plan.get(now, []))

    at(MOMENTS[0])
    if list(plan) != MOMENTS[:1]:
        for number in range(STEPS_BEFORE - 1):
            train_step(trained, number)
        train_step(trained, STEPS_BEFORE - 1, at)
        at(MOMENTS[3])
    assert len(done) == sum(map(len, plan.values()))
    is_removed = call == "remove" and done[0]
    if done[0] and call in ("remove", "abort", "synchronize") and moment in (MOMENTS[0], MOMENTS[3]):
        assert same_everywhere(*trained.ddp.parameters(), group=group), "right after the call"
    for number in (STEPS_BEFORE, STEPS_BEFORE + 1):
        expected = _mean_gradients(group, trained.ddp, number) if is_removed else []
        loss = train_step(trained, number)
        assert torch.tensor(loss).isfinite()
        for gradient, parameter in zip(expected, trained.ddp.parameters(), strict=False):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7)
    if is_removed or _is_exact(algorithm):
        assert same_everywhere(*trained.ddp.parameters(), group=group)
    _check_afterwards(trained, is_removed=is_removed, steps=2 if list(plan) == MOMENTS[:1] else STEPS_BEFORE + 2)


def _check_afterwards(trained: Trained, *, is_removed: bool, steps: int) -> None:
    assert trained.handle.stats()["steps"] == steps
    assert trained.handle.algorithm in repr(trained.handle)
    if not is_removed:
        if _runs_in_background(trained.handle.algorithm):
            trained.handle.abort()
        return
    trained.handle.remove()  # once more changes nothing
    assert trained.handle.stats()["memory"] == {}, "what the algorithm held it holds no more"
    handle = trained.handle
    for call in (handle.state_dict, handle.abort, handle.resume, handle.synchronize):
        with pytest.raises(RuntimeError, match="has been removed"):
            call()


def _train_around_each(algorithm: str) -> None:
    with emulated_hosts(HOSTS) as group:
        together = {moment: [call for call in CALLS if _changes_nothing(call, moment, algorithm)] for moment in MOMENTS}
        others = [{moment: [call]} for moment in MOMENTS for call in CALLS if call not in together[moment]]
        for plan in [together, *others]:
            with named(plan):
                _train_around(plan, algorithm, group)


@pytest.mark.parametrize("algorithm", bagua.available_algorithms())
def test_each_call_at_each_moment(rank_pools: Pools, algorithm: str) -> None:
    rank_pools[len(HOSTS)].run(_train_around_each, algorithm, timeout=SECONDS)


# --- removal ---


def _remove_too_early_on_one_rank(algorithm: str) -> str:
    trained = hooked(algorithm)
    train_step(trained, 0)
    # Also where torch's `_pytree` does not find what the model returns.
    wraps = trained.ddp.module.register_forward_hook(lambda module, given, output: Outputs({"inside": [output]}))
    returned = trained.ddp(torch.ones(2, 23))
    wraps.remove()
    if dist.get_rank() != 1:
        del returned  # no backward is to come
    with pytest.raises((RuntimeError, ValueError)) as refused:
        trained.handle.remove()
    returned = loss_of(trained.ddp, 1)
    del returned
    trained.handle.remove()
    train_step(trained, 2)
    assert same_everywhere(*trained.ddp.parameters())
    return f"{type(refused.value).__name__}: {refused.value}"


@pytest.mark.parametrize("algorithm", [name for name in bagua.available_algorithms() if not _is_exact(name)])
def test_a_rank_that_cannot_remove_the_algorithm_yet_keeps_it_on_all(rank_pools: Pools, algorithm: str) -> None:
    messages = rank_pools[3].run(_remove_too_early_on_one_rank, algorithm)
    assert "RuntimeError: bagua: remove()" in messages[1]
    assert "on rank 1 comes between a forward and its backward" in messages[1]
    for rank in (0, 2):
        assert "ValueError: bagua: rank 1 could not remove its algorithm" in messages[rank]


@on_ranks(2)
def test_ranks_have_common_statistics_again_after_a_removal() -> None:
    ddp = DDP(nn.Sequential(nn.Linear(23, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    handle = bagua.register_comm_hook(ddp, "local_sgd", optimizer=optimizer)
    for number in range(3):
        if number == 1:
            handle.remove()
        optimizer.zero_grad()
        sim.batch_loss(ddp, number, dist.get_rank()).backward()
        optimizer.step()
    # DDP gives all ranks those of rank 0 at the start of a forward.
    with torch.no_grad():
        ddp(torch.zeros(2, 23))
    assert same_everywhere(*(buffer.float() for buffer in ddp.buffers()))


@on_ranks(2)
def test_ranks_that_remove_at_other_moments_are_told_both() -> None:
    trained = hooked("decentralized")
    trained.optimizer.zero_grad()
    loss_of(trained.ddp, 0).backward()
    if dist.get_rank() == 1:
        trained.optimizer.zero_grad()
    with pytest.raises(ValueError, match="at another moment") as refused:
        trained.handle.remove()
    assert "rank 1" in str(refused.value)
    assert "between two steps against between a backward and its step" in str(refused.value)


def _remove_in_accumulation(removes: bool) -> Tensor:
    """A step of two synchronised backwards, after the second of which qadam is removed, or not."""
    trained = hooked("qadam")
    for number in range(STEPS_BEFORE):
        train_step(trained, number)
    trained.optimizer.zero_grad()
    for number in (7, 8):
        loss_of(trained.ddp, number).backward()
    if removes:
        trained.handle.remove()
    trained.optimizer.step()
    return sim.flat(trained.ddp.parameters())


def test_the_step_at_hand_is_the_same_when_qadam_has_been_removed(rank_pools: Pools) -> None:
    removed = rank_pools[2].run(_remove_in_accumulation, True)
    kept = rank_pools[2].run(_remove_in_accumulation, False)
    # The momentum is taken apart and put together again, in float32.
    torch.testing.assert_close(removed[0], kept[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(removed[0], removed[1])


# --- copies ---


@on_ranks(2)
@for_each(bagua.available_algorithms())
def test_a_hooked_model_cannot_be_copied_without_its_hook(algorithm: str) -> None:
    trained = hooked(algorithm)
    for duplicate in (pickle.dumps, copy.deepcopy, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(TypeError, match=r"cannot be pickled or deep-copied.*module\.state_dict"):
            duplicate(trained.ddp)
    copy.deepcopy(trained.ddp.module)
    pickle.dumps(trained.ddp.module.state_dict())
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(trained.handle)
    train_step(trained, 0)  # still works
    trained.handle.remove()


@on_ranks(2)
def test_a_followed_scaler_is_read_once_a_step_and_when_it_loads_a_checkpoint() -> None:
    handle = bagua.register_comm_hook(DDP(perceptron()), "powersgd", start_step=0)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=8.0)
    scaler.scale(torch.ones(1))  # which makes the scale
    saved = {**scaler.state_dict(), "scale": 64.0}
    read, reads, factors = scaler.get_scale, [], []
    scaler.get_scale = lambda: reads.append(read()) or reads[-1]
    handle.rescale = factors.append
    handle.follow(scaler)
    for change in (lambda: scaler.update(4.0), lambda: scaler.update(4.0), lambda: scaler.load_state_dict(saved)):
        change()
    scaler.update(32.0)
    assert reads == [8.0, 4.0, 4.0, 64.0, 32.0]
    assert factors == [1, 0.5, 0.5]


@on_ranks(2)
def test_a_copy_of_a_scaler_that_two_follow_is_a_scaler_of_its_own() -> None:
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=8.0)
    scaler.scale(torch.ones(1))
    of_two: list[list[float]] = [[], []]
    for factors in of_two:
        handle = bagua.register_comm_hook(DDP(perceptron()), "powersgd", start_step=0)
        handle.rescale = factors.append  # type: ignore[method-assign]
        handle.follow(scaler)
    scaler.update(4.0)
    for duplicate in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        twin = duplicate(scaler)
        assert twin.get_scale() == 4.0
        twin.scale(torch.ones(1))
        twin.update(16.0)
        twin.load_state_dict({**twin.state_dict(), "scale": 32.0})
        twin = duplicate(twin)
        assert (twin.get_scale(), scaler.get_scale()) == (32.0, 4.0)
    scaler.update(2.0)
    assert of_two == 2 * [[1, 0.5, 0.5]]
    handle._let_go()
    scaler.update(1.0)
    assert of_two == 2 * [[1, 0.5, 0.5]]
