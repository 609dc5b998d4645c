# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine, and how ranks that outnumber them share one.

python tests/support/gpus.py    # says how ranks would be placed here; exit code 2 without a GPU
"""

import os
import shutil
import sys
from collections.abc import Mapping
from typing import NamedTuple

# Asks NVML: a server of forked ranks that asked CUDA itself could not hand it on.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

NO_GPU = 2
_SHARING_IS_AN_OPTION = (2, 30)
# NCCL 2.28 takes 33 MB there for each rank and communicator that goes over sockets, and the ranks of a session keep
# about thirty.
_SHARED_MEMORY = "/dev/shm"
_SHARED_MEMORY_BYTES = 2 << 30


# Where kernels take turns on one GPU other protocols than Simple collapse (from reports of NCCL 2.29 on one RTX 5090).
# Few channels keep the kernels small; no fabric of several GPUs is looked for.
_OVER_LOOPBACK = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_PROTO": "Simple",
    "NCCL_MAX_NCHANNELS": "2",
    "NCCL_MNNVL_ENABLE": "0",
}


class Placement(NamedTuple):
    """Of each rank, the index of its GPU and what NCCL has to find in its environment."""

    gpus: list[int]
    env: list[Mapping[str, str]]
    how: str


def placement(nccl: tuple[int, ...], gpus: int, ranks: int, *, share: bool = False) -> Placement:
    """One GPU for each rank, or the first GPU for all where there are too few or `share` asks for it.

    NCCL 2.30 lets ranks share a GPU if told to. An older one refuses a GPU to two ranks of one host: there every rank
    is made a host of its own, which leaves NCCL nothing but sockets. (From reading NCCL; the older way has not been
    tried.)
    """
    if gpus < 1:
        raise ValueError(f"there is no GPU for {ranks} ranks")
    if ranks == 1 or (gpus >= ranks and not share):
        return Placement(list(range(ranks)), [{}] * ranks, f"{ranks} ranks: a GPU each")
    first = [0] * ranks
    version = ".".join(map(str, nccl))
    if nccl[:2] >= _SHARING_IS_AN_OPTION:
        env = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        return Placement(
            first, [env] * ranks, f"{ranks} ranks: share a GPU, NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL {version})"
        )
    hosts = [{**_OVER_LOOPBACK, "NCCL_HOSTID": f"rank-{rank}"} for rank in range(ranks)]
    return Placement(
        first, list(hosts), f"{ranks} ranks: share a GPU as hosts of their own, NCCL_HOSTID by rank (NCCL {version})"
    )


def gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def placement_here(ranks: int, *, share: bool = False) -> Placement:
    import torch

    return placement(torch.cuda.nccl.version(), gpu_count(), ranks, share=share)


def want_of_a_gpu() -> str:
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return f"for want of a GPU (torch {torch.__version__} with {built} sees none)"


def main() -> int:
    import torch

    gpus = gpu_count()
    if gpus == 0:
        print(f"GPU tests: NOTHING WAS RUN {want_of_a_gpu()}")
        return NO_GPU
    print(f"GPU tests: {gpus} GPUs, torch {torch.__version__}")
    for ranks in (1, 2, 3, 4):
        print(f"  {placement_here(ranks).how}")
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if free < _SHARED_MEMORY_BYTES:
        print(
            f"  {_SHARED_MEMORY} has {free >> 20} MiB left, and NCCL may need {_SHARED_MEMORY_BYTES >> 20}: "
            f"mount -o remount,size=4G {_SHARED_MEMORY}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
