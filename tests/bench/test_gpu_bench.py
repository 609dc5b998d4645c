# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks on a GPU make of their figures; the figures themselves need a GPU."""

import re

import accounting
import bagua  # noqa: F401  (registers torch.ops.bagua)
import bench_gpu
import pytest
import torch
from tables import table


@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
@pytest.mark.parametrize("elements", [1, 31, 33, 1000, 65_537])
def test_packed_bytes_are_those_of_the_codec(elements: int, chunks: int) -> None:
    packed = torch.ops.bagua.minmax_uint8_compress(torch.randn(elements), chunks)
    assert accounting.packed_bytes(elements, chunks) == packed.numel()


def test_a_tensor_that_is_coded_is_read_twice_and_one_that_is_decoded_written_once() -> None:
    tensor, packed = 4 * 1024, 2 * (32 + 512)
    assert accounting.compress(1024, 4, 2) == (2 * tensor + packed, tensor + packed)
    assert accounting.decompress(1024, 4, 2) == (tensor + packed, tensor + packed)


def test_a_reduction_reads_every_copy_of_a_part_and_writes_and_reads_its_mean() -> None:
    part, packed = 1024 // 8, 32 + 128
    assert accounting.reduce_and_compress(1024, 2, 8) == (8 * packed + 2 * part * 2 + packed, 9 * packed)


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    text = table(["way", "ms"], [["a longer name", "1"], ["b", "1234"]], left=1)
    assert text.splitlines() == ["way              ms", "a longer name     1", "b              1234"]


def test_what_is_slower_is_listed_with_the_worst_first_and_what_has_no_rival_is_counted() -> None:
    results = [
        {"test": "broadcast", "size": 4096, "ratio": 0.9},
        {"test": "all_reduce", "size": 8192, "ratio": 0.5},
        {"test": "all_gather", "size": 4096, "ratio": 0.96},
        {"test": "all_to_all", "size": 4096, "ratio": None},
    ]
    first, *slower = bench_gpu.slower_text(results, "nccl").splitlines()
    assert first == "1 of 3 are no slower than nccl (nccl / ours >= 0.95); 1 could not be compared"
    assert slower == ["  slower: all_reduce 8 KiB: 0.50", "  slower: broadcast 4 KiB: 0.90"]


def test_the_cost_of_a_hook_is_that_beside_a_step_with_the_same_optimizer() -> None:
    seconds = {"nccl": [1.0, 9.0, 1.0], "nccl, QAdam": [2.0], "bytegrad": [1.02], "qadam": [2.1], "async": [1.5]}
    measured = {"model": "m", "ways": [{"way": way, "times": times} for way, times in seconds.items()]}
    rows = [re.split(r"  +", line) for line in bench_gpu.cost_text(measured, "nccl").splitlines()[2:]]
    assert {row[0]: row[2:] for row in rows[2:]} == {
        "bytegrad": ["nccl", "+2.0%", "met"],
        "qadam": ["nccl, QAdam", "+5.0%", "above 3%"],
        "async": ["nccl", "+50.0%", "above 3%"],
    }
    assert [row[-1] for row in rows[:2]] == ["-", "-"]
