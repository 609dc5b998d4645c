# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in the original's layout: `iter_0000100/mp_rank_00_model_states.pt` and a file that names the latest.

Mixtures of experts, whose experts the original saves in files of their own, are not there.

Definition: Bagua 0.9.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

_logger = logging.getLogger("bagua")

_TRACKER = "latest_checkpointed_iteration.txt"


class _HasState(Protocol):
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


def save_checkpoint(
    iteration: int,
    checkpoints_path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: _HasState | None = None,
) -> None:
    """Save a training run on rank 0. All ranks call; they return when it is saved.

    The state of an algorithm (replicas of weights) is per rank and not saved here: for that, `handle.state_dict()` of
    `bagua.register_comm_hook`.

    Args:
        iteration: 0 or more; names the checkpoint, and will be returned by `load_checkpoint`.
        checkpoints_path: folder of all checkpoints, made if need be.
        model: what is saved of it is its `state_dict()`, as of the other arguments.
        optimizer: optional.
        lr_scheduler: optional.

    Raises:
        ValueError: a negative `iteration`.
        OSError: on rank 0, when it cannot write; RuntimeError with the same text on the others.
    """
    if iteration < 0:
        raise ValueError(f"save_checkpoint: iteration is to be 0 or more, got {iteration}")
    folder = Path(checkpoints_path)
    parts = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler}

    def save() -> None:
        state = {name: part.state_dict() for name, part in parts.items() if part is not None}
        _write(_model_file(folder, iteration), lambda path: torch.save({"iteration": iteration, **state}, path))
        _write(folder / _TRACKER, lambda path: path.write_text(str(iteration)))

    _agree("save_checkpoint", save if _rank() == 0 else _do_nothing)


def load_checkpoint(
    checkpoints_path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: _HasState | None = None,
    strict: bool = True,
) -> int:
    """Load the latest checkpoint on every rank. All ranks call.

    Args:
        checkpoints_path: the folder given to `save_checkpoint`; every rank has to see it.
        model: gets the saved weights and buffers, in place.
        optimizer: gets its state, if given.
        lr_scheduler: gets its state, if given.
        strict: as for `torch.nn.Module.load_state_dict` (the original ignores it).

    Returns:
        The iteration that was saved; 0, with a warning, where there is no checkpoint.

    Raises:
        RuntimeError: on all ranks, when one of them cannot load, or when they found different iterations; on the rank
            that cannot load, the error itself. Files are read with `weights_only=True`: classes of your own in the
            state of an optimizer or scheduler have to be allowed with `torch.serialization.add_safe_globals`.
    """
    folder = Path(checkpoints_path)

    def load() -> int:
        tracker = folder / _TRACKER
        if not tracker.is_file():
            _logger.warning("load_checkpoint: no checkpoint in %s, for there is no file %s", folder, _TRACKER)
            return 0
        iteration = _read_iteration(tracker)
        state = torch.load(_model_file(folder, iteration), map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"], strict=strict)
        for name, part in (("optimizer", optimizer), ("lr_scheduler", lr_scheduler)):
            if part is not None:
                if name not in state:
                    raise KeyError(f"load_checkpoint: the checkpoint of iteration {iteration} has no {name}")
                part.load_state_dict(state[name])
        return iteration

    found = _agree("load_checkpoint", load)
    if len(set(found)) > 1:
        raise RuntimeError(
            f"load_checkpoint: the ranks found different iterations in {folder}: {found} (by rank, 0 for none). Do all "
            "hosts see the same folder?"
        )
    return int(found[0])


def _model_file(folder: Path, iteration: int) -> Path:
    return folder / f"iter_{iteration:07d}" / "mp_rank_00_model_states.pt"


def _read_iteration(tracker: Path) -> int:
    text = tracker.read_text().strip()
    if not text.isdecimal():
        raise ValueError(f"{tracker} is to hold the number of an iteration, got {text[:80]!r}")
    return int(text)


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that it is there as a whole or not at all, whenever the process may end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    write(unfinished)
    os.replace(unfinished, path)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _do_nothing() -> int:
    return 0


def _agree(operation: str, act: Callable[[], Any]) -> list[Any]:
    """Act, then return what all ranks got; raise on all of them if it failed on one. Otherwise peers would wait."""
    failure: Exception | None = None
    result: Any = None
    try:
        result = act()
    except Exception as error:
        failure = error
    outcomes: list[Any] = [(result, None if failure is None else f"{type(failure).__name__}: {failure}")]
    if dist.is_initialized():
        outcome, outcomes = outcomes[0], [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome)
    if failure is not None:
        raise failure
    for rank, (_, text) in enumerate(outcomes):
        if text is not None:
            raise RuntimeError(f"{operation} failed on rank {rank}: {text}")
    return [one for one, _ in outcomes]
