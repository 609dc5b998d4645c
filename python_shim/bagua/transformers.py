# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: a callback that gives the Trainer one of our algorithms.

Make the process group first. TrainingArguments takes over the group that it finds::

    import torch.distributed as dist
    from bagua.transformers import BaguaCallback

    dist.init_process_group(backend="bagua")
    trainer = Trainer(...)
    trainer.add_callback(BaguaCallback(trainer, "bytegrad"))
    trainer.train()
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import Trainer, TrainerCallback

from bagua._argument_checks import check_algorithm, shown
from bagua._native import _C
from bagua._registry import describe
from bagua.handle import Handle, OptionArgument
from bagua.hooks import register_comm_hook
from bagua.stats import Stats, means_per_step

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["BaguaCallback"]


class BaguaCallback(TrainerCallback):  # type: ignore[misc]
    """Registers an algorithm on the Trainer's DistributedDataParallel model, and logs what it does.

    The algorithm is at work from the beginning to the end of each `train()`. With algorithms whose ranks differ, all
    ranks hold the same weights at the end. Whenever the Trainer logs a loss, rank 0 logs `bagua/bytes_sent_per_step`
    and the other means of `bagua.stats.means_per_step`, over the steps since the last log, to whatever the Trainer
    reports to.

    Args:
        trainer: the Trainer that the callback is added to.
        algorithm: one of `bagua.available_algorithms()`. One that needs the optimizer gets the Trainer's.
        **options: the algorithm's options.

    Raises:
        ValueError: an unknown algorithm or option, or a value out of range.
        TypeError: a trainer or an option of a wrong type; when training begins, a model that the Trainer has not
            wrapped in DistributedDataParallel, as with FSDP, DeepSpeed or one process.
    """

    def __init__(self, trainer: Trainer, algorithm: str = "gradient_allreduce", **options: OptionArgument) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"trainer must be the Trainer that the callback is added to, got {shown(trainer)}: write "
                "trainer.add_callback(BaguaCallback(trainer, 'bytegrad'))"
            )
        check_algorithm(algorithm, "; the Trainer comes first: write BaguaCallback(trainer, 'bytegrad')")
        _C.check_options(algorithm, options)
        # The Trainer holds its callbacks.
        self._trainer = weakref.ref(trainer)
        self._algorithm = algorithm
        self._options = options
        self._handle: Handle | None = None
        self._last: Stats | None = None

    @property
    def handle(self) -> Handle | None:
        """The algorithm at work; None before the training."""
        return self._handle

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Register the algorithm, once the Trainer has wrapped the model. Collective."""
        trainer = self._trainer()
        assert trainer is not None
        if self._handle is not None:
            self._handle.remove()
        optimizer = kwargs["optimizer"] if describe(self._algorithm)["optimizer"] else None
        wrapped: Any = trainer.model_wrapped
        self._handle = register_comm_hook(wrapped, self._algorithm, optimizer, None, **self._options)
        self._last = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Log beside the loss."""
        trainer = self._trainer()
        if trainer is None or self._handle is None or "loss" not in (logs or {}):
            return
        now = self._handle.stats()
        means = means_per_step(now, self._last)
        self._last = now
        if means:
            trainer.log({f"bagua/{name}": mean for name, mean in means.items()})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give all ranks the same weights: those of the end, or the best ones where the Trainer has loaded them again.

        Collective.
        """
        if self._handle is None:
            return
        trainer = self._trainer()
        model = trainer.model if trainer is not None else None
        if not args.load_best_model_at_end or state.best_model_checkpoint is None or not isinstance(model, nn.Module):
            self._end_rounds()
            return
        # An exchange that is under way would be written over what has been loaded, which is the same on all ranks.
        best = {name: value.clone() for name, value in model.state_dict(keep_vars=False).items()}
        self._end_rounds()
        model.load_state_dict(best)

    def _end_rounds(self) -> None:
        assert self._handle is not None
        if describe(self._algorithm)["runs_in_background"]:
            self._handle.abort()
        else:
            self._handle.synchronize()
