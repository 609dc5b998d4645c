# SPDX-License-Identifier: Apache-2.0
"""Counts the steps that weights have behind them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from bagua._attachment import makes_state_only, unwrapped
from bagua._progress import Progress, Stage
from bagua._torch_private import version_of


class StepCount:
    """Counts the steps of an optimizer, and sees whether one has failed in the middle, or what follows it has.

    It is made before the algorithm registers what that does after a step, which may fail when weights have changed.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = unwrapped(optimizer)
        self.progress = Progress(-1, Stage.DONE)
        # Of the step that has begun and not ended.
        self._versions_before: list[Any] | None = None
        self._hooks: list[Any] = [
            self._optimizer.register_step_pre_hook(self._begin),
            self._optimizer.register_step_post_hook(self._count),
        ]

    def watch_end(self) -> None:
        """See the end of a step from now on: the algorithm has registered what it does."""
        self._hooks.append(self._optimizer.register_step_post_hook(self._end))

    def begin_last(self) -> None:
        """Watch steps from behind the hooks that others have registered meanwhile: what these change is no failure."""
        self._hooks[0].remove()
        self._hooks[0] = self._optimizer.register_step_pre_hook(self._begin)

    def note_failure(self) -> None:
        """Tell a step that has failed in the middle from one that has not begun, as in a closure's backward."""
        if self._versions_before is not None and self._versions_before != self._versions():
            self.progress = self.progress._replace(stage=Stage.TORN)
        self._versions_before = None

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, *_: Any) -> None:
        self._versions_before = self._versions()

    def _count(self, *_: Any) -> None:
        self._versions_before = None
        if not makes_state_only(self._optimizer):
            self.progress = Progress(self.progress.step + 1, Stage.IN_STEP)

    def _end(self, *_: Any) -> None:
        if self.progress.stage is Stage.IN_STEP:
            self.progress = self.progress._replace(stage=Stage.AFTER_STEP)

    def _versions(self) -> list[Any]:
        """Return what differs once weights, or what is kept of them, have changed."""
        weights = [p for group in self._optimizer.param_groups for p in group["params"]]
        kept = [value for p in weights for value in self._optimizer.state.get(p, {}).values()]
        known = (value for value in weights + kept if isinstance(value, Tensor | int | float))
        return [version_of(value) if isinstance(value, Tensor) else value for value in known]
