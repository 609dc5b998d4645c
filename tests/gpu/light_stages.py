# SPDX-License-Identifier: Apache-2.0
"""The stages of the two pieces of the short run, in order of worth: see light.py."""

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import bagua
import checks_canary  # noqa: F401
from built import ROOT
from devices import DEVICE, STOCK_BACKEND
from light_run import IS_GPU, OK, Program, Stage
from sanitizer import BARRIERS_AND_FIRST_WRITES, MEMORY_AND_RACES, command, verdict

Programs = Callable[[Path], Sequence[Program]]
# Tried in turn, until two ranks of stock NCCL, and then of ours, can reduce.
WAYS_TO_SHARE = (
    {"NCCL_CUMEM_HOST_ENABLE": "0"},
    {"NCCL_CUMEM_ENABLE": "0", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"},
)
WAYS_OF_OURS = ({"NCCL_COMM_BLOCKING": "1"}, {"CUDA_MODULE_LOADING": "EAGER"})

FACTS = """
nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap --format=csv,noheader
uname -r; getconf GNU_LIBC_VERSION; nproc; df -m --output=size,avail /dev/shm | tail -n 1
ls -x /sys/class/net; type -P ip tc nvcc ncu gdb nvidia-cuda-mps-control; nvidia-smi -q >&2 || true
"""
# As the server of ranks does it that pytest's tests have.
FORK = """
import os, torch, torch._dynamo, torch.distributed.tensor, bagua
if os.fork() == 0:
    os._exit(int(torch.ones(1, device="cuda").item()) - 1)
raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def _facts(folder: Path) -> Sequence[Program]:
    programs = [
        Program("machine", ["bash", "-c", f"({FACTS}) 2>{folder}/nvidia-smi.txt"], lambda text, code: (OK, text)),
        Program("info", [sys.executable, "-m", "bagua.info"]),
    ]
    return [*programs, Program("fork", [sys.executable, "-c", FORK])] if IS_GPU else programs


def _contract(folder: Path) -> Sequence[Program]:
    # Without a GPU all that is asked is whether what was packed starts.
    codecs = bagua.available_codecs() if IS_GPU or (ROOT / "bin").exists() else []
    return [Program(f"contract.{codec}", command(codec), verdict) for codec in codecs]


def _sanitize(tools: Sequence[str], folder: Path) -> Sequence[Program]:
    """Each codec by itself, all at the same time."""
    return [
        Program(f"{tool}.{codec}", command(codec, tool), functools.partial(verdict, tool=tool))
        for tool in (tools if IS_GPU else ())
        for codec in bagua.available_codecs()
    ]


def _nets(folder: Path) -> Sequence[Program]:
    script = str(Path(__file__).with_name("nccl_nets.py"))
    return [Program(f"nccl_nets.{size}", [sys.executable, script, str(size)]) for size in (2, 4)]


def _bench(part: str, *options: str, env: Sequence[str] = (), name: str = "") -> Programs:
    """A part of `make bench-gpu`, whose figures are in the archive, as JSON and in its log. They never fail."""

    def programs(folder: Path) -> Sequence[Program]:
        script, file = ROOT / "benchmarks" / "gpu" / "bench_gpu.py", folder / f"{name or part}.json"
        command = ["env", *env, sys.executable, str(script), part, "--device", DEVICE, "--json", str(file), *options]
        return [Program(name or part, command)]

    return programs


SPEED = _bench("codec", "--sizes", str(256 << 20))
COST = _bench("hook", "--seconds", "2" if IS_GPU else "0.2", "--ways", "^gradient|^bytegrad|4bit|powersgd, rank 4")
REDUCE = _bench("collectives", "--ways", "all_reduce")
NON_BLOCKING = _bench(
    "collectives", "--ways", "all_reduce", env=["TORCH_NCCL_USE_COMM_NONBLOCKING=1"], name="stock_non_blocking"
)
TRANSPORT = (
    "^first_reductions$|^thousands|^collective|^sum_with|^wait_with|^compressed|^memory_of_a|^result_that"
    "|^operation_follows|^several_groups_do|^abort_ends"
)
TRACED = r"^host_waits.*\.(bytegrad|quantized_allreduce|gradient_allreduce|powersgd)$"
MEMORY, BARRIERS = (functools.partial(_sanitize, tools) for tools in (MEMORY_AND_RACES, BARRIERS_AND_FIRST_WRITES))

# fmt: off
PIECES = {
    1: [
        Stage("facts", 60, programs=_facts),
        Stage("canary", 75, "^reductions_in_a_loop$", programs=_contract, ways=WAYS_TO_SHARE, backend=STOCK_BACKEND),
        Stage("ours", 90, TRANSPORT, ways=WAYS_OF_OURS),
        Stage("hooks", 110, r"^hook\.|^rounds_of_async|^steps_after"),
        Stage("stock", 25, "^hook_on_a_stock_group", needs=("canary",)),
        Stage("traces", 35, TRACED),
        Stage("four", 90, "^collective|^hook_of_four|^hierarchical_hook|^channels_last.*hierarchical.views", 4, "AABB"),
        Stage("codecs", 30, "^codec_codes", 1, least=12),
        Stage("sanitizer", 90, programs=MEMORY, least=45),
        Stage("speed", 60, programs=SPEED, least=30, is_alone=True),
        Stage("cost", 60, programs=COST, least=25, is_alone=True),
    ],
    2: [
        Stage("failures", 75, "^peer_that_does_not_come_is.*all_reduce|^survivors.*all_reduce.2", least=20),
        Stage("graphs", 60, "^captur|^group_can_be", least=30),
        Stage("training", 45, "^fsdp2|^model_compiled_by_inductor.*bytegrad", least=15),
        Stage("nets", 90, programs=_nets, least=20, is_alone=True),
        Stage("reduce", 40, programs=REDUCE, least=15, is_alone=True),
        Stage("reduce_beside", 40, programs=NON_BLOCKING, is_alone=True),
        Stage("sanitizer_more", 60, programs=BARRIERS),
    ],
}
