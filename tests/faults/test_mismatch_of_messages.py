# SPDX-License-Identifier: Apache-2.0
"""Messages between two ranks that do not fit together: an error of both ends."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from trouble import TRANSPORTS, Outcome, cause_of, expect_error, new_world, selection, until_told, warm_up

SIZE = 3
ODD_ONE = 1
TIMEOUT = 3.0


def _message_of_another_size(length: int) -> Outcome:
    new_world(TIMEOUT)
    warm_up()
    # One of the right size arrives.
    if dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
        # A small message has gone before anybody looks at it.
        return expect_error(until_told(lambda: dist.send(torch.ones(length), 1)))
    received = torch.zeros(4)
    dist.recv(received, 0)
    assert received.tolist() == [1.0] * 4
    return expect_error(lambda: dist.recv(received, 0))


def _messages_of_other_sizes(lengths: Sequence[int]) -> list[Outcome]:
    return [_message_of_another_size(length) for length in lengths]


def test_a_message_of_another_size_than_expected_is_an_error_of_both_ends() -> None:
    lengths = [3, 100_000]
    for length, *outcomes in zip(lengths, *run_ranks(2, _messages_of_other_sizes, lengths), strict=True):
        cause = cause_of(outcomes)
        assert "bagua:recv" in cause
        assert "(Float[4], peer rank 0)" in cause
        assert f"rank 0 sends a message of {4 * length} bytes with tag 0, where this rank has a place for 16" in cause


def _message_against_collective() -> Outcome:
    warm_up()
    if dist.get_rank() == ODD_ONE:
        return expect_error(lambda: dist.recv(torch.zeros(4), 0))
    return expect_error(lambda: dist.all_reduce(torch.ones(4)))


@pytest.mark.parametrize("transport", selection(TRANSPORTS, ["between-hosts"]))
def test_a_message_against_a_collective_ends_at_the_timeout_which_names_both(transport: str) -> None:
    outcomes = run_ranks(SIZE, _message_against_collective, env=TRANSPORTS[transport], group_timeout=TIMEOUT)
    cause = cause_of(outcomes)
    assert f"timed out after {1000 * TIMEOUT:.0f} ms" in cause
    assert "bagua:all_reduce #2 (Float[4], sum)" in cause
    assert "bagua:recv #0 (Float[4], peer rank 0)" in cause


def _messages_with_tags() -> list[float]:
    # With and without room for the size in the tag.
    tags = [0, 7, 65_535, 65_536, 2**30 - 1]
    values = [torch.full((number + 1,), float(tag)) for number, tag in enumerate(tags)]
    received = [torch.zeros(number + 1) for number in range(len(tags))]
    if dist.get_rank() == 0:
        works = [dist.isend(value, 1, tag=tag) for value, tag in zip(values, tags, strict=True)]
    else:
        works = [dist.irecv(place, 0, tag=tag) for place, tag in reversed(list(zip(received, tags, strict=True)))]
    for work in works:
        assert work is not None
        work.wait()
    with pytest.raises(ValueError, match="a tag must be from 0 to"):
        dist.isend(torch.ones(1), 1 - dist.get_rank(), tag=2**30)
    return [place[-1].item() for place in received]


def test_messages_are_told_apart_by_their_tags() -> None:
    assert run_ranks(2, _messages_with_tags)[1] == [0.0, 7.0, 65_535.0, 65_536.0, float(torch.tensor(2.0**30 - 1))]
