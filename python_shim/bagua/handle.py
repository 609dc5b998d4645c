# SPDX-License-Identifier: Apache-2.0
"""Figures and control of an algorithm at work on a model."""

from __future__ import annotations

from typing import Any

from bagua._attachment import PICKLE_ADVICE, Attachment
from bagua._native import _C

OptionValue = bool | int | float | str


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
            `wire_bytes_between_hosts`; `seconds` (stage -> seconds of the communication threads, of which there
            are two between hosts; on CUDA the time to enqueue the stage).
        """
        return self._hook.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint of this rank needs: the algorithm, its options, bucket layout and state.

        Every rank has its own. Call it between two steps, and save model and optimizer at the same time.
        """
        self._check_at_work()
        return {
            "algorithm": self.algorithm,
            "options": self.options,
            "layout": self._hook.layout(),
            "state": self._hook.state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict()` returned on the same rank.

        Raises:
            ValueError: the state is of another algorithm, of other options or of another model.
        """
        self._check_at_work()
        own = {"algorithm": self.algorithm, "options": self.options}
        for key, value in own.items():
            if state_dict.get(key) != value:
                raise ValueError(
                    f"the checkpoint was written with {key} {state_dict.get(key)!r}, this hook has {value!r}"
                )
        self._hook.load(state_dict["state"], state_dict["layout"])
        if self._attachment is not None:
            self._attachment.state_loaded()

    def remove(self) -> None:
        """Take the algorithm off the model: from the next step on DDP averages gradients in full precision.

        Collective: call it on every rank between the same two steps. Where ranks hold different weights these are
        averaged first.
        """
        if self._is_removed:
            return
        self._hook.leave()
        self._is_removed = True
        if self._attachment is not None:
            self._attachment.remove()

    def abort(self) -> None:
        """Stop background communication (algorithm "async"; others raise RuntimeError).

        Collective: returns when all ranks have called it, with the same weights on all of them, and the buffers of rank
        0. Does nothing where communication is stopped already.
        """
        self._check_at_work()
        if self._hook.abort() and self._attachment is not None:
            self._attachment.broadcast_buffers()

    def resume(self) -> None:
        """Let background communication go on after `abort` (algorithm "async"; others raise RuntimeError).

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
