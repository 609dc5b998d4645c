# SPDX-License-Identifier: Apache-2.0
"""How far a rank has come with a training whose members come and go: which weights it has, or what part of them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from bagua._gradual_transfer import GradualTransfer


class Stage(IntEnum):
    """How far a rank is with the block of code around its last step, the furthest last."""

    # The step after that has failed in the middle: it has changed some weights, and others not.
    TORN = -1
    # The algorithm may still have something to do, or has failed at it. What follows the step has not begun.
    IN_STEP = 0
    # What follows the step, such as a scheduler's, may have been done or not.
    AFTER_STEP = 1
    DONE = 2


class Progress(NamedTuple):
    """Which weights a rank has: those after so many steps of the optimizer.

    -1: none that the others could share. A_PART: some of those of the others, and some that mean nothing.
    """

    step: int
    stage: Stage


A_PART = Progress(-2, Stage.DONE)


class Part(NamedTuple):
    """What a newcomer has whose transfer was interrupted.

    Attributes:
        step: how many steps of the optimizer it has behind it, all of which it took as the others did.
        group: in which group that was.
        parameters: digest of the list of those that travel.
        numbers: how many numbers of them it has.
    """

    step: int
    group: int
    parameters: int
    numbers: int

    @classmethod
    def of(cls, transfer: GradualTransfer, step: int, group: int) -> Part:
        """Return what a transfer has brought to this rank, which has taken these steps in this group."""
        return cls(step, group, digest_of(transfer.parameters), transfer.own_numbers)


def digest_of(parameters: Sequence[int]) -> int:
    """Return a number that tells lists of parameters apart."""
    return zlib.crc32(repr(list(parameters)).encode())
