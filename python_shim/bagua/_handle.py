# SPDX-License-Identifier: Apache-2.0
"""Figures and control of an algorithm at work on a model."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from bagua._argument_checks import check_checkpoint
from bagua._attachment import PICKLE_ADVICE, Attachment
from bagua._native import _C
from bagua._registry import comparable, describe
from bagua._states import StatesOfAllRanks
from bagua._stats import Stats, as_text, line_stats, means_per_step

OptionValue = bool | int | float | str | None
# What becomes one: words are kept as "a, b", a mapping as "a=b, c=d".
OptionArgument = OptionValue | Sequence[str] | Mapping[str, str]


def check_scaler(scaler: Any) -> None:
    """Refuse what cannot be followed."""
    if not callable(getattr(scaler, "update", None)) or not callable(getattr(scaler, "get_scale", None)):
        raise TypeError(f"expected a torch.amp.GradScaler, got {type(scaler).__qualname__}")


class _WatchedMethod:
    """Calls something after a method of an object. Deep copies of the object have the method alone."""

    def __init__(self, owner: Any, name: str, after: Callable[[], None]) -> None:
        self._owner = owner
        self._name = name
        self._method = getattr(owner, name)
        self._after = after
        functools.update_wrapper(self, self._method, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._method(*args, **kwargs)
        self._after()

    def __reduce__(self) -> tuple[Any, ...]:
        # The copy of the owner has no attributes of its own yet when this is asked of it.
        return getattr, (self._owner, self._name)


class Handle:
    """What `register_comm_hook` returns: figures and control of one algorithm at work on one model.

    It is a context manager, for algorithms that run in the background. They end with the block, on all ranks together::

        with bagua.register_comm_hook(model, "async", optimizer=optimizer) as handle:
            train()

    Without the block, and without `abort`, an "async" that is left at work ends when its group is destroyed, or with
    the process, if the ranks get there within ten seconds of each other.
    """

    def __init__(
        self, hook: _C.Hook, attachment: Attachment | None, place: _C.HookPlace | None, group: dist.ProcessGroup
    ) -> None:
        self._hook = hook
        self._group = group
        # Where the hook is registered on a DDP model, for the algorithm that comes after `remove`.
        self.place = place
        self._attachment = attachment
        self._is_removed = False
        self._followed: weakref.WeakSet[torch.amp.GradScaler] = weakref.WeakSet()
        # What log_to() wrote last.
        self._logged: Stats | None = None

    @property
    def algorithm(self) -> str:
        """The algorithm's name."""
        return self._hook.name

    @property
    def options(self) -> dict[str, OptionValue]:
        """All of the algorithm's options, with the defaults filled in."""
        return self._hook.options

    @property
    def is_removed(self) -> bool:
        """Whether `remove` has been called."""
        return self._is_removed

    @property
    def keeps_residuals(self) -> bool:
        """Whether error feedback is at work, which `follow` has to tell of changes of a loss scale."""
        return self._hook.keeps_residuals

    @property
    def needs_state(self) -> bool:
        """Whether a training that continues without `state_dict()` would miss something."""
        info = describe(self.algorithm)
        # The residuals of qadam are of momenta, which have no scale.
        of_momenta = info["optimizer"] == "QAdamOptimizer" and self.options["error_feedback"] is True
        return self.keeps_residuals or of_momenta or self.options.get("guard") == "adapt" or not info["is_exact"]

    @property
    def layout(self) -> list[list[int]]:
        """Which gradients travel together, by the positions of their parameters; empty in the first steps."""
        return self._hook.layout()

    def stats(self) -> Stats:
        """Return what this rank has done so far; see `Stats` for keys and units."""
        return cast("Stats", {**self._hook.stats(), "line": line_stats()})

    def reset(self) -> None:
        """Have `stats` count from zero again, on this rank alone. What is under way counts when it is over."""
        self._hook.reset_stats()
        self._logged = None

    def log_to(self, writer: Any, step: int | None = None) -> None:
        """Write the figures of this rank to TensorBoard or Weights & Biases, for as often as they are to have a point.

        Written are, as `bagua/<name>`, `rounds`, `state_bytes` and means over the steps since the last call:
        `logical_bytes_per_step`, `wire_bytes_per_step`, `wire_bytes_between_hosts_per_step` (bytes), and
        `seconds_per_step/<stage>` (seconds). Without a step since the last call nothing is written.

        Args:
            writer: an object with `add_scalar(tag, value, step)`, such as `torch.utils.tensorboard.SummaryWriter`, or
                with `log(figures)`, such as what `wandb.init()` returns.
            step: where the points are. By default at the number of steps that training has taken, or, with W&B, where
                its next `log` is.

        Raises:
            TypeError: a writer of another kind.
        """
        now = self.stats()
        figures = means_per_step(now, self._logged)
        if not (hasattr(writer, "add_scalar") or hasattr(writer, "log")):
            raise TypeError(
                "expected a writer with add_scalar(), such as TensorBoard's SummaryWriter, or with log(), such as what "
                f"wandb.init() returns, got {type(writer).__qualname__}"
            )
        if not figures:
            return
        self._logged = now
        figures |= {"rounds": now["rounds"], "state_bytes": now["state_bytes"]}
        named = {f"bagua/{name}": figure for name, figure in figures.items()}
        if hasattr(writer, "add_scalar"):
            for name, figure in named.items():
                writer.add_scalar(name, figure, self._hook.step() if step is None else step)
        elif step is None:
            writer.log(named, commit=False)
        else:
            writer.log(named, step=step)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint of this rank needs: algorithm, options, layout, steps, state and the guard's levels.

        Every rank has its own. Call it between two steps, and save model and optimizer at the same time.
        """
        self._check_at_work()
        return {
            "algorithm": self.algorithm,
            "options": self.options,
            "layout": self._hook.layout(),
            "step": self._hook.step(),
            "rank": self._group.rank(),
            "ranks": self._group.size(),
            # The same on all ranks, unlike the state.
            "guard": self._hook.guard_table(),
            "state": self._hook.state(),
        }

    def of_all_ranks(self) -> StatesOfAllRanks:
        """Return an object whose `state_dict()` holds the states of all ranks, for rank 0 to write.

        It is for libraries that save what was registered on rank 0 alone, and load that on every rank, such as
        accelerate: `accelerator.register_for_checkpointing(handle.of_all_ranks())`. Where ranks differ between rounds
        it holds each rank's weights and optimizer, too. Its methods are collective.
        """
        return StatesOfAllRanks(self, self._attachment, self._group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict()` returned on the same rank.

        Options that the checkpoint lacks had their defaults. `guard` may be another than it was. Background
        communication goes on, also from a state that was saved after `abort`.

        Raises:
            ValueError: the state is of another algorithm, of other options or of another model, or incomplete.
            TypeError: it, or a part of it, is of another type than what `state_dict()` returns.
        """
        self._check_state_dict(state_dict)
        self._load(state_dict)
        # Many a state was saved after abort(), at the end of a training.
        self._go_on()
        if self._attachment is not None:
            self._attachment.state_loaded()

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise what `load_state_dict` raises of this state, and load nothing."""
        self._check_at_work()
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"the checkpoint must be a dict, got {type(state_dict).__qualname__}")
        missing = [key for key in ("algorithm", "options", "state", "layout") if key not in state_dict]
        if missing:
            raise ValueError(
                f"the checkpoint lacks {', '.join(missing)}: pass what the state_dict() of this rank's handle has "
                "returned, not that of the model or the optimizer"
            )
        if "order" in state_dict:
            raise ValueError("the checkpoint is of what bagua.comm_hook returned, which numbers parameters otherwise")
        for key, own in (("algorithm", self.algorithm), ("options", self.options)):
            saved, name = state_dict[key], self.algorithm
            if saved != own and (key == "algorithm" or comparable(saved, name) != comparable(own, name)):
                raise ValueError(
                    f"the checkpoint was written with {key} {saved!r}, this hook has {own!r}: register it with the same"
                )
        check_checkpoint(state_dict)
        self._check_rank(state_dict)

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        # A checkpoint from before steps were counted begins with the first.
        self._hook.load(state_dict["state"], state_dict["layout"], state_dict.get("step", 0), state_dict.get("guard"))

    def _check_rank(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse the state of another rank of as many: a library has written that of rank 0 for all."""
        rank, ranks = self._group.rank(), self._group.size()
        written_by = state_dict.get("rank", rank)
        if state_dict["state"] and state_dict.get("ranks", ranks) == ranks and written_by != rank:
            raise ValueError(
                f"the checkpoint holds the state of rank {written_by}, this is rank {rank}: each rank has its own. A "
                "library that saves on rank 0 alone takes handle.of_all_ranks() in the handle's place"
            )

    def rescale(self, factor: float) -> None:
        """Multiply what error feedback holds back of gradients, where these change their scale.

        For a loss scale of your own: from one step to the next, call it with new scale / old scale, on every rank
        alike. For torch's GradScaler `follow` does that.

        Raises:
            RuntimeError: an algorithm that remembers no gradients. "quantized_allreduce" and "powersgd" do.
            ValueError: a factor that is not above 0.
        """
        self._check_at_work()
        self._hook.rescale(factor)

    def follow(self, scaler: torch.amp.GradScaler) -> None:
        """Have `scaler.update()` call `rescale` from now on, whenever it changes its scale.

        Call it once for a scaler, on every rank alike. A checkpoint of the run has to hold `scaler.state_dict()`, too.

        Raises:
            RuntimeError: as `rescale`.
            TypeError: what is no GradScaler.
        """
        check_scaler(scaler)
        self.rescale(1)
        if scaler in self._followed:
            return
        self._followed.add(scaler)
        # Kept, as CUDA is waited for by whoever reads it. Besides update() only a checkpoint changes it.
        scale = scaler.get_scale()

        def rescale_if_changed() -> None:
            nonlocal scale
            before, scale = scale, scaler.get_scale()
            # A scale that has fallen to 0 leaves nothing to rescale.
            if scale != before and scale > 0 and before > 0 and not self._is_removed:
                self.rescale(scale / before)

        def look() -> None:
            nonlocal scale
            scale = scaler.get_scale()

        watched: Any = scaler
        watched.update = _WatchedMethod(scaler, "update", rescale_if_changed)
        watched.load_state_dict = _WatchedMethod(scaler, "load_state_dict", look)

    def _let_go(self) -> None:
        """Have nothing that outlives the model hold the algorithm: parameters, scalers. Not collective."""
        if self._attachment is not None:
            self._attachment.detach()
        for scaler in self._followed:
            for name in ("update", "load_state_dict"):
                vars(scaler).pop(name, None)

    def remove(self) -> None:
        """Take the algorithm off the model: from the next backward on gradients are averaged in full precision.

        `register_comm_hook` then takes the model again, for another algorithm.

        Collective: call it on every rank at the same place of the training loop. Algorithms whose ranks differ (see
        `docs/algorithms.md`) make them equal first: weights, and gradients that the optimizer has not taken yet, are
        averaged over the ranks, and the optimizer's state becomes that of rank 0. QAdamOptimizer goes on as without
        an algorithm: after its warm-up the variance stays frozen, and the momentum is updated by the averaged gradient.

        Raises:
            RuntimeError: an algorithm whose ranks differ would change the weights between a forward and its backward.
                The algorithm stays at work.
            ValueError: the same of another rank, or ranks that are not at the same place.
        """
        if self._is_removed:
            return
        if self._attachment is None:
            self._hook.leave("", "", [], [])
        else:
            self._attachment.remove()
        self._is_removed = True

    def synchronize(self) -> None:
        """Give all ranks the same weights, and go on (algorithms whose ranks differ; others have nothing to do).

        Algorithms with rounds ("local_sgd", "diloco") end the round at hand here; "diloco" takes its outer step with
        what the ranks have done since the last. Others average the weights. Ranks whose buffers differ take rank 0's,
        unless they are averaged.

        Collective: call it on every rank at the same place of the training loop.

        Raises:
            RuntimeError: between a forward and its backward, which needs the weights as they are.
            ValueError: the same of another rank, or ranks that have taken other numbers of steps.
        """
        self._check_at_work()
        self._hook.synchronize()
        if self._attachment is not None:
            self._attachment.broadcast_buffers()

    def abort(self) -> None:
        """Stop background communication (algorithms "async", "local_sgd", "diloco"; others raise RuntimeError).

        Collective: returns when all ranks have called it, with the same weights on all of them, as after
        `synchronize`, and the buffers of rank 0. Does nothing where communication is stopped already. Between a forward
        and its backward, which needs the weights as they are, it raises RuntimeError.
        """
        self._check_at_work()
        if self._hook.abort() and self._attachment is not None:
            self._attachment.broadcast_buffers()

    def resume(self) -> None:
        """Let background communication go on after `abort` (of the same algorithms).

        Every rank has to call it, but does not wait for the others.
        """
        self._check_at_work()
        self._hook.resume()

    def _go_on(self) -> None:
        if not self._is_removed and describe(self.algorithm)["runs_in_background"]:
            self._hook.resume()

    def __enter__(self) -> Handle:
        """Let background communication go on, as `resume`, after an earlier block."""
        self._go_on()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """End background communication, as `abort`. After an exception no rank waits for another: nothing is done."""
        if error is None and not self._is_removed and describe(self.algorithm)["runs_in_background"]:
            self.abort()

    def _check_at_work(self) -> None:
        if self._is_removed:
            raise RuntimeError(f"algorithm {self.algorithm!r} has been removed from its model")

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"<bagua.Handle {self.algorithm}({options})>"

    def __str__(self) -> str:
        """Return the algorithm, its options and its figures so far."""
        return f"{self!r}\n{as_text(self.stats())}"

    def __reduce__(self) -> str:
        raise TypeError(PICKLE_ADVICE)
