# SPDX-License-Identifier: Apache-2.0
"""Collectives of Python objects."""

from typing import Any

import torch
import torch.distributed as dist
from ranks import on_ranks


def _thing(rank: int) -> dict[str, Any]:
    return {"rank": rank, "text": "x" * (100 * rank), "nested": [None, (rank, {"tensor": [rank] * rank})]}


@on_ranks("ranks")
def test_object_collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = [_thing(other) for other in range(size)]

    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, _thing(rank))
    assert gathered == everyone

    for root in range(size):
        at_root: list[Any] | None = [None] * size if rank == root else None
        dist.gather_object(_thing(rank), at_root, dst=root)
        assert at_root == (everyone if rank == root else None)

        sent: list[Any] = [_thing(root), "second"] if rank == root else [None, None]
        dist.broadcast_object_list(sent, src=root)
        assert sent == [_thing(root), "second"]

        received: list[Any] = [None]
        dist.scatter_object_list(received, everyone if rank == root else None, src=root)
        assert received == [_thing(rank)]


@on_ranks("ranks")
def test_object_may_hold_tensors() -> None:
    received: list[Any] = [{"weights": torch.arange(5.0)}] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(received, src=0)
    assert torch.equal(received[0]["weights"], torch.arange(5.0))


@on_ranks("peers")
def test_objects_are_sent_to_one_rank() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        for peer in range(1, size):
            dist.send_object_list([_thing(peer), peer], dst=peer)
    else:
        received: list[Any] = [None, None]
        assert dist.recv_object_list(received, src=0) == 0
        assert received == [_thing(rank), rank]
