# SPDX-License-Identifier: Apache-2.0
"""The states of an algorithm on all ranks as one, for libraries whose rank 0 alone writes checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from bagua._attachment import Attachment
from bagua._executors import gathered_states
from bagua._registry import describe

if TYPE_CHECKING:
    from bagua._handle import Handle


class StatesOfAllRanks:
    """What `Handle.of_all_ranks` returns, which says what it is for."""

    def __init__(self, handle: Handle, attachment: Attachment | None, group: dist.ProcessGroup) -> None:
        self._handle = handle
        # Where the ranks differ, each goes on with the weights and the optimizer that it had.
        self._attachment = None if describe(handle.algorithm)["is_exact"] else attachment
        self._group = group

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on the first rank, and none on the others. Collective."""
        own: dict[str, Any] = {"handle": self._handle.state_dict()}
        if self._attachment is not None:
            own |= {name: one.state_dict() for name, one in self._attachment.with_states().items()}
        return {"ranks": gathered_states(own, self._group)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore this rank's part of what `state_dict` has returned on the first rank.

        Raises:
            ValueError: it holds the states of another number of ranks, or what `Handle.load_state_dict` refuses.
        """
        ranks = state_dict.get("ranks", [])
        size = self._group.size()
        if len(ranks) != size:
            raise ValueError(
                f"the checkpoint holds the states of {len(ranks)} ranks of algorithm {self._handle.algorithm!r}, the "
                f"group has {size}: resume with as many ranks, or register the hook without its state"
            )
        own = ranks[self._group.rank()]
        # Nothing is loaded where the handle refuses its state.
        self._handle._check_state_dict(own["handle"])
        if self._attachment is not None:
            # All states are looked up before the first is loaded.
            for one, state in [(one, own[name]) for name, one in self._attachment.with_states().items()]:
                one.load_state_dict(state)
        self._handle.load_state_dict(own["handle"])
