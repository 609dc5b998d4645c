# SPDX-License-Identifier: Apache-2.0
"""torchft: a process group for its Manager, which makes the group anew as replicas come and go::

    from bagua.torchft import ProcessGroupBagua
    from torchft import Manager

    manager = Manager(pg=ProcessGroupBagua(timeout=timedelta(seconds=30)), ...)

For torchft 0.2, or torch before 2.14. Its nightly versions take a group of backend "bagua" as it is, made with
`enable_reconfigure=True`.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torchft.process_group import ProcessGroupWrapper  # type: ignore[import-untyped,import-not-found]

from bagua._at_exit import shut_down_with_process
from bagua._backend import create_backend
from bagua._torch_private import BackendOptions, backend_of, group_over, set_timeout

__all__ = ["ProcessGroupBagua"]


class ProcessGroupBagua(ProcessGroupWrapper):  # type: ignore[misc]
    """Backend "bagua" as torchft takes it: between replicas, whose number may change from step to step.

    Args:
        timeout: of making the group, and of every operation of it that says no other.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        options = BackendOptions()
        options.store, options.timeout = store, self._timeout
        options.group_rank, options.group_size = rank, world_size
        # torchft 0.2 numbers its groups, later versions name them.
        number = self._uuid if hasattr(self, "_uuid") else self._quorum_id
        options.group_id = f"torchft_{number}"  # type: ignore[assignment]
        options.global_ranks_in_group = self._global_ranks or list(range(world_size))
        backend = create_backend(options, None)
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        group = group_over(backend, store, rank, world_size, devices)
        shut_down_with_process(group)
        return group

    def getBackendName(self) -> str:
        """Return the name by which torchft's own groups are told apart."""
        return "torchft-bagua"

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of this group, from its next operation on, and of those that are made later."""
        super().set_timeout(timeout)
        if self._pg is not None:
            set_timeout(backend_of(self._pg, torch.device("cpu")).options, timeout)
