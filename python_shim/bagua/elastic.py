# SPDX-License-Identifier: Apache-2.0
"""A training that goes on when processes die, and takes in those that join, without a restart::

    with bagua.elastic.Members(store) as members:
        training = members.train(DDP(network), optimizer, "bytegrad")
        while training.step < 1000:
            with training.attempt():
                train_one_step(training.step)

`docs/members.md` has the rules. `python -m bagua.elastic` serves a store to meet in.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bagua._buckets import settle_buckets
from bagua._gradual_transfer import GradualTransfer
from bagua._handle import Handle, OptionArgument
from bagua._healing import TrainingState
from bagua._hooks import register_comm_hook
from bagua._meeting_store import serve
from bagua._members import MemberGroup, is_of_operation
from bagua._progress import A_PART, Part, Progress, Stage
from bagua._registry import describe
from bagua._step_count import StepCount
from bagua._torch_private import can_reconfigure

__all__ = ["Members", "Training", "heal"]

_logger = logging.getLogger("bagua")
_Done = TypeVar("_Done")
# How many blocks may fail one after another while the members stay the same, before the failure is raised.
_MOST_FRUITLESS = 3
# A message has a cost of its own.
_LEAST_STEP_BYTES = 1 << 16


def heal(
    ddp: DistributedDataParallel,
    optimizer: Optimizer,
    handle: Handle | None = None,
    others: Sequence[Any] = (),
    *,
    step: int,
    limit: timedelta = timedelta(hours=1),
) -> int:
    """Give ranks that are behind what a rank has that has come furthest, bit for bit. Collective.

    They take over weights, buffers, the state of the optimizer and of `others`, and the layout of DDP's buckets. What
    the algorithm remembers follows at the next forward. The training waits meanwhile.

    Args:
        ddp: the model. On a rank that joins, DDP has built its final buckets.
        optimizer: its optimizer.
        handle: what `register_comm_hook` has returned for it.
        others: what else has `state_dict` and `load_state_dict`, in the same order on all ranks.
        step: how many steps this rank has taken. Those with the most have the same weights; -1 has none of its own.
        limit: for all of it.

    Returns:
        The step of the furthest rank.

    Raises:
        ValueError: models of different shapes, on all ranks.
    """
    return TrainingState(ddp, optimizer, handle, others).heal(Progress(step, Stage.DONE), limit).step


class Members:
    """Makes the default process group, of this process alone at first, and joins those that train already.

    Args:
        store: where processes agree on who the members are; served by one that outlives them.
        at_least: how many there have to be. With fewer, those that live wait for others.
        timeout: of the group's operations.
        patience: how long a member that lives, but does not come, is waited for when another has died. It may join
            again later.
        share: by what share of its time a training step may become longer for a newcomer's weights and optimizer state.
            The first steps send so much more than without, later ones what fits. Where all would take more than half a
            minute, steps take up to some seconds longer. 0 has all travel at once, while the others wait.

    Raises:
        ValueError: a share that is none.
        RuntimeError: a torch before 2.14, or a default process group that is there already.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        at_least: int = 1,
        timeout: timedelta = timedelta(minutes=10),
        patience: timedelta = timedelta(seconds=30),
        share: float = 0.1,
    ) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"bagua.elastic: share has to be from 0 to 1, got {share}")
        if not can_reconfigure():
            raise RuntimeError(f"bagua.elastic needs torch 2.14 or later, this is {torch.__version__}")
        if dist.is_initialized():
            raise RuntimeError("bagua.elastic.Members makes the default process group, and there is one already")
        self._group = MemberGroup(store, at_least, timeout, patience)
        self._share = share
        self._training: Training | None = None
        self._is_closed = False

    def train(
        self,
        ddp: DistributedDataParallel,
        optimizer: Optimizer,
        algorithm: str = "gradient_allreduce",
        others: Sequence[Any] = (),
        *,
        step: int = 0,
        **options: OptionArgument,
    ) -> Training:
        """Register an algorithm, join the other members, and take over what they have come to.

        Args:
            ddp: the model, made after this object, without a hook.
            optimizer: its optimizer.
            algorithm: one of `available_algorithms()` whose ranks take the same steps.
            others: what else has `state_dict` and `load_state_dict`, and the same state on all members: schedulers,
                scalers.
            step: how many steps the weights have behind them, of a checkpoint. It counts where nobody trains yet.
            **options: the algorithm's.

        Raises:
            ValueError: what `register_comm_hook` refuses, "async", a model with static_graph=True or
                delay_all_reduce_named_params, or one of another shape, or other options, than the members that train
                already.
            RuntimeError: a second call; or a process that cannot reach all other members, or not the store.
        """
        if describe(algorithm)["steps_may_differ"]:
            raise ValueError(f"bagua.elastic trains in steps that all members take alike; {algorithm!r} does not")
        if ddp.static_graph:
            raise ValueError("bagua.elastic does not work with static_graph=True: who joins has to lay out buckets")
        if self._training is not None:
            raise RuntimeError("bagua.elastic.Members trains one model, and train() has been called already")
        settle_buckets(ddp)
        with contextlib.ExitStack() as undo:
            count = StepCount(optimizer)
            undo.callback(count.stop)
            given: Any = options
            handle = register_comm_hook(ddp, algorithm, optimizer=optimizer, **given)
            undo.callback(handle.remove)
            # The others would wait in that.
            undo.callback(self._group.become_alone)
            count.watch_end()
            state = TrainingState(ddp, optimizer, handle, others)
            state.check()
            share = 0.0 if describe(algorithm)["optimizer"] else self._share
            self._training = Training(self._group, ddp, handle, state, count, step=step, share=share)
            undo.pop_all()
        return self._training

    def close(self) -> None:
        """Leave the other members at once, which go on, and destroy the process group."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._training is not None:
            self._training.stop_counting()
        self._group.close()

    def __enter__(self) -> Members:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Wait for the other members to come to the end, too, and leave. After an error this leaves at once."""
        try:
            if error is None and self._training is not None and not self._is_closed:
                self._training.wait_for_end()
        finally:
            self.close()


class Training:
    """The steps that the members take together, of the model `ddp` with the algorithm of `handle`."""

    def __init__(
        self,
        group: MemberGroup,
        ddp: DistributedDataParallel,
        handle: Handle,
        state: TrainingState,
        count: StepCount,
        *,
        step: int,
        share: float,
    ) -> None:
        self.ddp = ddp
        self.handle = handle
        self._group = group
        self._state = state
        self._count = count
        self._first_step = step
        self._share = share
        self._transfer: GradualTransfer | None = None
        # What the last step has taken.
        self._seconds = 0.0
        # Steps and bytes at the last change.
        self._sent = (0, 0)
        # The groups that it has been in since its last step, the last of them, and what step that was.
        self._groups: frozenset[int] = frozenset()
        self._met, self._met_at = 0, 0
        self._are_weights_equal = describe(handle.algorithm)["is_exact"]
        # How many blocks or meetings have failed one after another while the members stayed the same.
        self._fruitless = 0
        # An error of the user's code by which the last block has ended.
        self._left_by: BaseException | None = None
        self._meet()

    @property
    def step(self) -> int:
        """How many steps of the optimizer the weights have behind them, here as on all members."""
        return self._count.progress.step

    @property
    def is_healing(self) -> bool:
        """Whether this member's gradients do not count yet, as some weights have not come. Its outputs mean nothing."""
        return self._transfer is not None and self._transfer.is_newcomer

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Try one step: forward, backward, and the optimizer's step.

        If a member dies meanwhile, the block ends with no error and the step may count or not: `step` says. Members
        that have missed it take it over from one that has not. Gradients are dropped.

        Another error leaves the block. If the loop goes on after it, the next block begins as after a death.

        Raises:
            DistError: one that comes again and again, though no member dies.
            Exception: one by which blocks have ended again and again.
        """
        votes, work = self._again_after_deaths(lambda: self._group.ask(self._seconds))
        begin = time.monotonic()
        try:
            if self._transfer is not None:
                self._transfer.begin_part()
            yield
            self._count.progress = self._count.progress._replace(stage=Stage.DONE)
            work.wait()
            if self._transfer is not None:
                self._transfer.end_part()
                self._transfer.pace(float(votes[1]))
                if self._transfer.is_over:
                    self._stop_transfer()
                    self._heal()
        except dist.DistError as error:
            self._go_on(error)
        except BaseException as error:
            self._left_by = error
            raise
        else:
            self._fruitless = 0
            self._seconds = time.monotonic() - begin
            # Who waits comes after the newcomers that heal now.
            if votes[0] and self._transfer is None:
                self._meet()

    def wait_for_end(self) -> None:
        """Return when all members have come to their last step, and have all its weights. Collective.

        The end of the block `with members` does this.
        """
        self._again_after_deaths(self._end)

    def stop_counting(self) -> None:
        """Leave optimizer and gradients as they were."""
        self._stop_transfer()
        self._count.stop()

    def _again_after_deaths(self, do: Callable[[], _Done]) -> _Done:
        """Do what all members do together; first have them begin again after an error that the loop has got over."""
        if self._left_by is not None:
            left_by, self._left_by = self._left_by, None
            self._go_on(left_by)
        while True:
            try:
                return do()
            except dist.DistError as error:
                self._go_on(error)

    def _end(self) -> None:
        self._group.wait_for_all()
        if self._transfer is not None:
            self._stop_transfer()
            self._heal(step_bytes=0)

    def _go_on(self, error: BaseException) -> None:
        _logger.warning("a step has failed; those who live go on: %s", str(error).split("\n")[0])
        self._count.note_failure()
        self._state.forget_step()
        self._meet(error)

    def _meet(self, error: BaseException | None = None) -> None:
        """Go on with those who live, from what the furthest has; after an error with those who are left by it."""
        self._stop_transfer()
        while True:
            members = self._group.members
            if error is not None:
                self._group.abort()
                self.handle._hook.abort_own_groups()
            try:
                self._group.meet(self._contract())
                self._heal()
            except dist.DistError as another:
                _logger.warning("a member has died while they met: %s", str(another).split("\n")[0])
                self._count_failure(members, another, is_own=False)
                error = another
                continue
            if error is not None:
                self._count_failure(members, error, is_own=not is_of_operation(error))
            return

    def _count_failure(self, former: Sequence[str], error: BaseException, *, is_own: bool) -> None:
        """Raise an error that comes again and again though nobody leaves.

        Members whose own code raises it do so first. An operation fails on all of them, whoever is to blame.
        """
        if self._group.members != former:
            self._fruitless = 0
            return
        self._fruitless += 1
        most = _MOST_FRUITLESS
        if not is_own:
            # The newest member first: the others try as often once more without it.
            most += len(former) - former.index(self._group.name)
        if self._fruitless >= most:
            raise error

    def _contract(self) -> list[str]:
        options = ", ".join(f"{key}={value!r}" for key, value in self.handle.options.items())
        return [f"the algorithm {self.handle.algorithm}({options})", *self._state.shapes()]

    def _stop_transfer(self) -> None:
        if self._transfer is None:
            return
        self._transfer.stop()
        step, stage = self._count.progress
        if self._transfer.is_newcomer and not self._transfer.is_whole:
            if stage is not Stage.TORN:
                self._state.part = Part.of(self._transfer, step, self._met)
            self._count.progress = A_PART
        self._transfer = None

    def _heal(self, step_bytes: int | None = None) -> None:
        step_bytes = self._step_bytes() if step_bytes is None else step_bytes
        limit, progress = timedelta(hours=1), self._count.progress
        # A member that has got no further than this one may not know the last of these, in which it has failed to heal.
        groups = self._groups if progress.step == self._met_at else frozenset({self._met})
        try:
            self._count.progress = self._state.heal(
                progress,
                limit,
                groups=groups,
                first_step=self._first_step,
                are_weights_equal=self._are_weights_equal,
                step_bytes=step_bytes,
                share=self._share,
            )
        except BaseException:
            self._count.progress, self._groups = self._state.progress, self._state.groups
            self._met_at = self._count.progress.step
            raise
        self._transfer = self._state.transfer
        # What has come in a step is put in place before the step is watched.
        self._count.begin_last()
        self._met, self._met_at = self._group.uuid, self.step
        self._groups = self._state.groups | {self._met}

    def _step_bytes(self) -> int:
        """How much of a newcomer's weights travels in a step."""
        if self._share == 0:
            return 0
        stats = self.handle.stats()
        sent = stats["steps"], stats["wire_bytes"]
        # Of the steps with those members that there were last.
        steps, wire_bytes = (now - before for now, before in zip(sent, self._sent, strict=True))
        self._sent = sent
        gradients = sum(p.nbytes for p in self.ddp.parameters() if p.requires_grad)
        in_step = wire_bytes // steps if steps > 0 and wire_bytes > 0 else gradients
        return max(_LEAST_STEP_BYTES, int(in_step * self._share))


if __name__ == "__main__":
    serve()
