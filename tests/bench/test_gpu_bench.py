# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks on a GPU make of their figures; the figures themselves need a GPU."""

import re

import accounting
import bench_gpu
from tables import table


def test_only_minmax_reads_twice_what_it_codes_and_what_is_decoded_is_written_once() -> None:
    tensor, packed = 4 * 1024, 1088
    for codec, reads in (("minmax_uint8", 2), ("4bit", 1)):
        assert accounting.encode(codec, 1024, 4, packed, feedback=False) == reads * tensor + packed
        # A residual is read with the values, and written.
        assert accounting.encode(codec, 1024, 4, packed, feedback=True) == reads * 2 * tensor + tensor + packed
    assert accounting.decode(1024, 4, packed) == tensor + packed


def test_a_mean_reads_every_copy_of_a_part_and_is_written_and_by_minmax_read_again() -> None:
    part, packed = 2 * accounting.chunk_length(1021, 8), 160
    assert accounting.mean("minmax_uint8", 128, 2, packed, 8) == 9 * packed + 2 * part
    assert accounting.mean("4bit", 128, 2, packed, 8) == 9 * packed + part


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
