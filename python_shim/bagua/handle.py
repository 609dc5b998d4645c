# SPDX-License-Identifier: Apache-2.0
"""Figures and control of an algorithm at work on a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bagua._attachment import PICKLE_ADVICE, Attachment
from bagua._native import _C

OptionValue = bool | int | float | str | None
# What becomes one: words are kept as "a, b", a mapping as "a=b, c=d".
OptionArgument = OptionValue | Sequence[str] | Mapping[str, str]


class Handle:
    """What `register_comm_hook` returns: figures and control of one algorithm at work on one model."""

    def __init__(self, hook: _C.Hook, attachment: Attachment | None) -> None:
        self._hook = hook
        self._attachment = attachment
        self._is_removed = False

    @property
    def algorithm(self) -> str:
        """The algorithm's name."""
        return self._hook.name

    @property
    def options(self) -> dict[str, OptionValue]:
        """All of the algorithm's options, with the defaults filled in."""
        return self._hook.options

    def stats(self) -> dict[str, Any]:
        """Return what this rank has done so far.

        Returns:
            `algorithm`; `steps` and `buckets` (synchronised backwards, and buckets in them); `rounds` (times that the
            ranks communicated for a step); `logical_bytes` (gradients or weights that had to be communicated);
            `wire_bytes` (bytes sent to other ranks for them), of which `wire_bytes_in_host` and
            `wire_bytes_between_hosts`; `state_bytes` (memory that the algorithm keeps between steps, such as the
            residuals of error feedback); `seconds` (stage -> seconds of the communication threads, of which there
            are two between hosts; on CUDA the time to enqueue the stage); `memory` (of algorithms that hold weights of
            their own: what they hold beside the model -> bytes).
        """
        return self._hook.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint of this rank needs: the algorithm, its options, bucket layout, steps and state.

        Every rank has its own. Call it between two steps, and save model and optimizer at the same time.
        """
        self._check_at_work()
        return {
            "algorithm": self.algorithm,
            "options": self.options,
            "layout": self._hook.layout(),
            "step": self._hook.step(),
            "state": self._hook.state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict()` returned on the same rank.

        Raises:
            ValueError: the state is of another algorithm, of other options or of another model, or incomplete.
        """
        self._check_at_work()
        own = {"algorithm": self.algorithm, "options": self.options}
        for key, value in own.items():
            if state_dict.get(key) != value:
                raise ValueError(
                    f"the checkpoint was written with {key} {state_dict.get(key)!r}, this hook has {value!r}"
                )
        missing = [key for key in ("state", "layout") if key not in state_dict]
        if missing:
            raise ValueError(f"the checkpoint lacks {' and '.join(missing)}: load what state_dict() has returned")
        # A checkpoint from before steps were counted begins with the first.
        self._hook.load(state_dict["state"], state_dict["layout"], state_dict.get("step", 0))
        if self._attachment is not None:
            self._attachment.state_loaded()

    def remove(self) -> None:
        """Take the algorithm off the model: from the next backward on gradients are averaged in full precision.

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

    def _check_at_work(self) -> None:
        if self._is_removed:
            raise RuntimeError(f"algorithm {self.algorithm!r} has been removed from its model")

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"<bagua.Handle {self.algorithm}({options})>"

    def __reduce__(self) -> str:
        raise TypeError(PICKLE_ADVICE)
