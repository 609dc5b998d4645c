# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a soak do: a random sequence of calls, the same on every rank because it comes from one seed."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from reference import COMPLEX, DTYPES, FLOATS, MEANINGFUL

# Values that calls take as their input; every rank can name those of every other.
POOL_LENGTH = 1 << 23

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_list")
MOVES = (
    "broadcast",
    "all_gather",
    "all_gather_list",
    "all_to_all",
    "all_to_all_uneven",
    "all_to_all_list",
    "gather",
    "scatter",
)
MESSAGES = ("message", "ring", "batch", "from_anyone")
OTHERS = ("coalesced", "barrier", "objects", "rounding")
KINDS = (*REDUCTIONS, *MOVES, *MESSAGES, *OTHERS)
_WEIGHTS = [*[4] * len(REDUCTIONS), *[3] * len(MOVES), 4, 4, 3, 3, 4, 2, 1, 3]

# torch.distributed itself refuses products of complex numbers.
_REDUCIBLE = [case for case in MEANINGFUL if not (case[0] == "PRODUCT" and case[1] in COMPLEX)]
# How often one of the groups is destroyed and made anew, in calls.
_RENEWAL = 250
# How often a call is of more bytes than those below which ranks of one host go through a slot of shared memory at once,
# and than Gloo takes in one piece. Rarely: every rank computes what all put in.
_LARGE_PROBABILITY = 0.006
_LARGE_BYTES = 1 << 23


@dataclass(frozen=True)
class Call:
    """One operation of one group, or with kind "renew" the end of the group and the beginning of its successor."""

    number: int
    kind: str
    group: int
    dtype: torch.dtype = torch.float32
    op: str = "SUM"
    # Elements of what one rank puts in, or of one part of it.
    numel: int = 0
    # Positions in the group.
    root: int = 0
    receiver: int = 0
    # Where the values of the group's first rank begin in the pool, and how far those of the next one lie from there.
    offset: int = 0
    stride: int = 0
    is_async: bool = False
    # Of whatever else is random in this kind of call.
    seed: int = 0


def members_of_groups(seed: int, world_size: int, count: int = 5) -> list[list[int]]:
    """Everybody, and `count` - 1 groups of two or more ranks that overlap as they will."""
    random_numbers = random.Random(f"groups {seed}")
    groups = [list(range(world_size))]
    while len(groups) < count:
        size = random_numbers.randint(2, world_size)
        groups.append(sorted(random_numbers.sample(range(world_size), size)))
    return groups


def calls(seed: int, groups: list[list[int]], operations: int) -> Iterator[Call]:
    """Yield `operations` calls and, between them, renewals of groups."""
    random_numbers = random.Random(f"calls {seed}")
    for number in range(operations):
        if number % _RENEWAL == _RENEWAL - 1:
            yield Call(number, "renew", random_numbers.randrange(len(groups)))
        yield _call(number, groups, random_numbers)


def _call(number: int, groups: list[list[int]], random_numbers: random.Random) -> Call:
    group = random_numbers.randrange(len(groups))
    size = len(groups[group])
    kind = random_numbers.choices(KINDS, _WEIGHTS)[0]
    is_reduction = kind in (*REDUCTIONS, "coalesced")
    op, dtype = random_numbers.choice(_REDUCIBLE) if is_reduction else ("SUM", random_numbers.choice(DTYPES))
    if kind == "rounding":
        dtype = random_numbers.choice(FLOATS)
    numel = _numel(kind, size, dtype, random_numbers)
    root, receiver = random_numbers.sample(range(size), 2)
    # A row holds a part for every rank, or one; rows may overlap.
    room = POOL_LENGTH - numel * (size if _is_cut(kind) else 1)
    offset = random_numbers.randrange(room)
    return Call(
        number,
        kind,
        group,
        dtype,
        op,
        numel,
        root,
        receiver,
        offset,
        stride=random_numbers.randrange((room - offset) // size + 1),
        is_async=random_numbers.random() < 0.6,
        seed=random_numbers.getrandbits(32),
    )


def _is_cut(kind: str) -> bool:
    """Whether the input has a part for every rank."""
    return kind.startswith(("reduce_scatter", "all_to_all", "scatter", "coalesced"))


def _numel(kind: str, size: int, dtype: torch.dtype, random_numbers: random.Random) -> int:
    """Mostly small; now and then nothing, or more than any piece that a transport cuts tensors into."""
    dice = random_numbers.random()
    if dice > 1 - _LARGE_PROBABILITY and dtype.itemsize >= 4:
        numel = int(_LARGE_BYTES / dtype.itemsize * random_numbers.uniform(1, 1.5))
        return numel // size if _is_cut(kind) else numel
    if dice < 0.02:
        return 0
    largest = 10 if dice < 0.7 else 14 if dice < 0.97 else 17
    numel = int(2 ** random_numbers.uniform(0, largest))
    return max(1, numel // size) if _is_cut(kind) else numel
