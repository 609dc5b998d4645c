# SPDX-License-Identifier: Apache-2.0
"""The last operations of every rank are written when a group fails, in the format that torch's analysis reads."""

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from holdings import wait_for
from hooked_models import captured_stderr
from ranks import run_ranks
from script_ranks import run_script
from trouble import TRANSPORTS, VICTIM, die, expect_error, fail_without_the_victim, warm_up

SIZE = 3
TIMEOUT = 3.0
ANALYSIS = "from torch.distributed.flight_recorder.fr_trace import main; main()"


def _time_out(files: int) -> None:
    """Fail, and wait until there are so many files."""
    warm_up()
    fail_without_the_victim(lambda: dist.all_reduce(torch.ones(5)))
    # Who did not come learns of the failure too, and writes what it did: its file comes a moment later.
    folder = Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"]).parent
    wait_for(lambda: len(list(folder.glob("trace_*"))) >= files)


def test_a_timeout_writes_what_every_rank_did(tmp_path: Path) -> None:
    prefix = tmp_path / "trace_"
    run_ranks(SIZE, _time_out, SIZE, env={"TORCH_FR_DUMP_TEMP_FILE": str(prefix)}, group_timeout=TIMEOUT)
    dumps = {rank: pickle.loads(Path(f"{prefix}{rank}").read_bytes()) for rank in range(SIZE)}
    for rank, dump in dumps.items():
        names = [entry["profiling_name"] for entry in dump["entries"]]
        states = [entry["state"] for entry in dump["entries"]]
        assert names == ["c10d:all_reduce"] * (2 if rank == VICTIM else 3)
        assert states == ["completed", "completed"] + ([] if rank == VICTIM else ["started"])
    if torch.__version__.startswith("2.11."):
        pytest.skip("the analysis of torch 2.11 reads records of NCCL only; the records are as they should be")
    # torch's analysis finds the rank that did not come.
    (analysis,) = run_script(ANALYSIS, 1, tmp_path, str(tmp_path), "-p", "trace_")
    assert f"missing ranks: {{{VICTIM}}}" in analysis.output, analysis.output


@pytest.mark.long
@pytest.mark.parametrize("dumps", ["1", "0"])
@pytest.mark.parametrize("variable", ["TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"])
def test_a_variable_keeps_the_files_from_being_written(variable: str, dumps: str, tmp_path: Path) -> None:
    env = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "trace_"), variable: dumps}
    run_ranks(SIZE, _time_out, SIZE if dumps == "1" else 0, env=env, group_timeout=TIMEOUT)
    assert len(list(tmp_path.iterdir())) == (SIZE if dumps == "1" else 0)


def _die_before_a_bucket() -> tuple[str, str]:
    import bagua

    # On several hosts there are two threads that run buckets.
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 7))
    bagua.register_comm_hook(ddp, "bytegrad", hierarchical=False)
    for _ in range(2):
        ddp(torch.ones(2, 6)).sum().backward()
    loss = ddp(torch.ones(2, 6)).sum()
    if dist.get_rank() == VICTIM:
        die()
    with captured_stderr() as written:
        message = expect_error(loss.backward).message
        # Whoever waits is released first.
        wait_for(lambda: "The last operations of this rank are in" in written(), 30.0)
        return message, written()


def test_the_bucket_in_which_a_peer_has_died_is_written_and_logged(tmp_path: Path) -> None:
    prefix = tmp_path / "trace_"
    env = {**TRANSPORTS["between-hosts"], "TORCH_FR_DUMP_TEMP_FILE": str(prefix)}
    results = run_ranks(SIZE, _die_before_a_bucket, env=env, dying={VICTIM})
    assert not Path(f"{prefix}{VICTIM}").exists()
    for rank, (message, written) in enumerate(results[:VICTIM]):
        last = pickle.loads(Path(f"{prefix}{rank}").read_bytes())["entries"][-1]
        operation = last["bagua_operation"]
        assert re.fullmatch(
            r"bagua:reduce_bucket #\d+ \(Float\[49\], "
            r"bytegrad\(average=True, codec='int8', guard='warn', hierarchical=False, start_step=0\), gradients 1-0\)",
            operation,
        )
        assert last["state"] == "started"
        assert last["input_sizes"] == [[49]]
        assert message.startswith(f"{operation} on rank {rank} of {SIZE}")
        # As torch logs errors, once.
        lines = [line for line in written.splitlines() if "The last operations of this rank are in" in line]
        assert len(lines) == 1, written
        assert re.match(rf"\[rank{rank}\]:\[E.* health_thread\.cpp:\d+\] bagua: rank {rank}, group '", lines[0]), lines
        # By its connection, or by its silence.
        assert re.search(rf"rank {VICTIM} (at |has gone|\(does not answer)", lines[0]), lines
        assert lines[0].endswith(f"The last operations of this rank are in {prefix}{rank}")


ENDING = """
import os, signal
from datetime import timedelta
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
store = dist.FileStore(os.environ["STORE"], 2)
dist.init_process_group("bagua", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
dist.all_reduce(torch.ones(4))
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(5))
"""


def test_a_process_that_ends_with_the_error_has_written_its_file(tmp_path: Path) -> None:
    end, _ = run_script(ENDING, 2, tmp_path, env={"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "trace_")}, codes=[1, -9])
    assert "DistBackendError: bagua:all_reduce #1 (Float[5], sum) on rank 0 of 2" in end.output
    entries = pickle.loads((tmp_path / "trace_0").read_bytes())["entries"]
    assert [entry["input_sizes"] for entry in entries] == [[[4]], [[5]]]
    assert [entry["state"] for entry in entries] == ["completed", "started"]


def _entries() -> list[dict[str, Any]]:
    from bagua._native import _C

    rank = dist.get_rank()
    dist.broadcast(torch.ones(7), 0)
    if rank == 0:
        dist.send(torch.ones(2), 1)
    else:
        dist.recv(torch.ones(2), 0)
    dist.barrier()
    entries: list[dict[str, Any]] = pickle.loads(_C.flight_recorder_trace())["entries"]
    return entries


def test_operations_are_named_as_torch_names_them() -> None:
    first, second = run_ranks(2, _entries)
    assert [entry["profiling_name"] for entry in first] == [
        "c10d:broadcast",
        "c10d:send 0->1",
        "c10d:all_reduce_barrier",
    ]
    assert [entry["profiling_name"] for entry in second] == [
        "c10d:broadcast",
        "c10d:recv 1<-0",
        "c10d:all_reduce_barrier",
    ]
    assert first[0]["input_sizes"] == [[7]]
    assert first[0]["bagua_operation"] == "bagua:broadcast #0 (Float[7], peer rank 0)"


def _ranks_recorded_by_a_hook() -> str:
    import bagua
    from bagua._native import _C

    group = dist.new_group([1, 2], backend="gloo")
    if dist.get_rank() == 0:
        return ""
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2), process_group=group)
    bagua.register_comm_hook(ddp, "gradient_allreduce")
    ddp(torch.ones(3, 4)).sum().backward()
    dump = pickle.loads(_C.flight_recorder_trace())
    name = dump["entries"][-1]["process_group"][0]
    ranks: str = dump["pg_config"][name]["ranks"]
    return ranks


def test_a_hook_on_a_stock_group_records_the_global_ranks() -> None:
    assert run_ranks(3, _ranks_recorded_by_a_hook) == ["", "[1, 2]", "[1, 2]"]


def _many_operations() -> int:
    from bagua._native import _C

    for _ in range(30):
        dist.all_reduce(torch.ones(3))
    return len(pickle.loads(_C.flight_recorder_trace())["entries"])


def test_the_number_of_operations_kept_is_torch_s_setting() -> None:
    assert run_ranks(2, _many_operations, env={"TORCH_FR_BUFFER_SIZE": "10"}) == [10, 10]
    assert run_ranks(2, _many_operations, env={"TORCH_FR_BUFFER_SIZE": "0"}) == [0, 0]
