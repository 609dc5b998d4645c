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

import functools
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from bagua._argument_checks import check_algorithm, shown
from bagua._handle import Handle, OptionArgument
from bagua._hooks import register_comm_hook
from bagua._native import _C
from bagua._registry import describe
from bagua._stats import Stats, means_per_step
from bagua._tensors_apart import gathered

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["BaguaCallback"]

# In a checkpoint of the Trainer.
_FOLDER = "bagua"
_last_checkpoint: Any = get_last_checkpoint


class BaguaCallback(TrainerCallback):  # type: ignore[misc]
    """Registers an algorithm on the Trainer's DistributedDataParallel model, and logs what it does.

    The algorithm is at work from the beginning to the end of each `train()`. With algorithms whose ranks differ, all
    ranks hold the same weights at the end. Whenever the Trainer logs a loss, rank 0 logs `bagua/wire_bytes_per_step`
    and the other means of `bagua.Handle.log_to`, over the steps since the last log, to whatever the Trainer
    reports to.

    Each checkpoint of the Trainer gets a folder "bagua" with a file for every rank: the handle's state and, where ranks
    differ between rounds, the rank's own weights and optimizer. `train(resume_from_checkpoint=...)` goes on from them
    with the bits of an unbroken training. The Trainer's loss scale is followed.

    Args:
        trainer: the Trainer that the callback is added to.
        algorithm: one of `bagua.available_algorithms()`. It gets the Trainer's optimizer.
        begins_anew: whether a checkpoint without the algorithm's state may be resumed from: it then begins as
            in a new training.
        **options: the algorithm's options.

    Raises:
        ValueError: an unknown algorithm or option, or a value out of range.
        TypeError: a trainer or an option of a wrong type; when training begins, a model that the Trainer has not
            wrapped in DistributedDataParallel, as with FSDP, DeepSpeed or one process.
    """

    def __init__(
        self,
        trainer: Trainer,
        algorithm: str = "gradient_allreduce",
        *,
        begins_anew: bool = False,
        **options: OptionArgument,
    ) -> None:
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
        self._begins_anew = begins_anew
        self._options = options
        self._resumed_from: Path | None = None
        self._watch_train(trainer)
        self._handle: Handle | None = None
        self._last: Stats | None = None

    def _watch_train(self, trainer: Trainer) -> None:
        """Note which checkpoint `train()` resumes from, of which callbacks are not told."""
        train = trainer.train

        @functools.wraps(train)
        def noting(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
            given = resume_from_checkpoint
            folder = _last_checkpoint(trainer.args.output_dir) if given is True else given
            self._resumed_from = Path(folder) if folder else None
            return train(resume_from_checkpoint, *args, **kwargs)

        trainer.train = noting  # type: ignore[method-assign]

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
        wrapped: Any = trainer.model_wrapped
        self._handle = register_comm_hook(wrapped, self._algorithm, kwargs["optimizer"], None, None, **self._options)
        if self._resumed_from is not None:
            self._restore(self._resumed_from, wrapped, kwargs["optimizer"])
        self._last = None

    def _restore(self, checkpoint: Path, model: nn.Module, optimizer: Any) -> None:
        assert self._handle is not None
        file = checkpoint / _FOLDER / f"rank-{dist.get_rank()}-of-{dist.get_world_size()}.pt"
        are_there = gathered(file.is_file())
        if not all(are_there):
            lacking = [str(rank) for rank, is_there in enumerate(are_there) if not is_there]
            if self._begins_anew or not self._handle.needs_state:
                return
            raise ValueError(
                f"{checkpoint} holds no state of algorithm {self._algorithm!r} for rank {', '.join(lacking)} of "
                f"{len(are_there)}: {file} and its like are missing. Resume with the algorithm and the number of ranks "
                "that wrote the checkpoint, or pass begins_anew=True to BaguaCallback"
            )
        saved = torch.load(file, map_location="cpu", weights_only=True)
        if "model" in saved:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        self._handle.load_state_dict(saved["handle"])

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the states of all ranks to the checkpoint that the Trainer has written."""
        trainer = self._trainer()
        if self._handle is None or trainer is None or args.save_only_model:
            return
        # Each trial of a search for hyperparameters has a folder of its own.
        folder = Path(trainer._get_output_dir(trainer._trial), f"checkpoint-{state.global_step}", _FOLDER)
        folder.mkdir(parents=True, exist_ok=True)
        saved: dict[str, Any] = {"handle": self._handle.state_dict()}
        if not describe(self._algorithm)["is_exact"]:
            wrapped: Any = trainer.model_wrapped
            saved |= {"model": wrapped.state_dict(), "optimizer": kwargs["optimizer"].state_dict()}
        torch.save(saved, folder / f"rank-{dist.get_rank()}-of-{dist.get_world_size()}.pt")

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
