# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint of Lightning holds of an algorithm: an entry "bagua" with the state of every rank.

Lightning has rank 0 write one file. Where all ranks hold the same weights, an algorithm's state is a few numbers per
rank. Where they differ, an exact continuation needs each rank's weights and optimizer as well. The entry holds plain
containers and tensors only, so that `torch.load(weights_only=True)` reads it.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from bagua._executors import gathered_states
from bagua._handle import Handle
from bagua._registry import comparable
from bagua._torch_private import default_group

_KEY = "bagua"
_PARTS_OF_A_RANK = ("state_dict", "optimizer_states")


def add_states_of_all_ranks(checkpoint: dict[str, Any], state: dict[str, Any], *, with_weights: bool) -> None:
    """Put the `Handle.state_dict()` of all ranks into the checkpoint of rank 0. Collective.

    `with_weights`, the weights and optimizers of the others go there, too: what the state has of them comes first.
    """
    rank = dist.get_rank()
    own = {part: state[part] for part in ("state", "layout", "step", "guard")}
    if with_weights and rank != 0:
        own |= {part: state.get(part, checkpoint[part]) for part in _PARTS_OF_A_RANK}
    everyones = gathered_states(own, default_group())
    if rank == 0:
        checkpoint[_KEY] = {"algorithm": state["algorithm"], "options": state["options"], "ranks": everyones}


def why_not_exact(checkpoint: dict[str, Any], handle: Handle) -> str:
    """Return why the algorithm cannot go on where the checkpoint was written, or "" if it can."""
    entry = checkpoint.get(_KEY)
    if entry is None:
        return "holds no state of an algorithm"
    if entry["algorithm"] != handle.algorithm:
        return f"was written with algorithm {entry['algorithm']!r}"
    if comparable(entry["options"], handle.algorithm) != comparable(handle.options, handle.algorithm):
        return f"was written with the options {entry['options']}"
    if len(entry["ranks"]) != dist.get_world_size():
        return f"was written by {len(entry['ranks'])} ranks"
    return ""


def of_this_rank(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the checkpoint with this rank's weights and optimizers in it, and the rank's `Handle.state_dict()`."""
    entry = checkpoint[_KEY]
    own = entry["ranks"][dist.get_rank()]
    state = {"algorithm": entry["algorithm"], "options": entry["options"]}
    # A checkpoint from before steps were counted begins with the first.
    state |= {"state": own["state"], "layout": own["layout"], "step": own.get("step", 0), "guard": own.get("guard")}
    return {**checkpoint, **{part: own[part] for part in _PARTS_OF_A_RANK if part in own}}, state
