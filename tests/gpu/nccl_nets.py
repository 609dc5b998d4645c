# SPDX-License-Identifier: Apache-2.0
"""Whether NCCL computes the same over bagua's transport as over its own sockets: every collective, to the bit.

    python tests/gpu/nccl_nets.py 2

With ranks that share a GPU, each a host of its own; groups of stock `nccl` and of backend `bagua`; in the clear and
encrypted. On the CPU (BAGUA_TEST_DEVICE=cpu, Gloo for NCCL) it shows that the comparison itself works.
"""

import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

for _name in ("gpu", "support", "multiprocess", "soak"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / _name))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from bagua.info import nccl_net  # noqa: E402
from devices import DEVICE, STOCK_BACKEND, settle  # noqa: E402
from ranks import RankPool  # noqa: E402

COUNTS = (0, 1, 1003, 1_000_000 if DEVICE == "cuda" else 30_000)
DTYPES = (torch.float32, torch.float16, torch.int64)
SECRET = {"BAGUA_JOB_SECRET": "a secret of a test, worth nothing"}
OWN = {
    STOCK_BACKEND: {"NCCL_NET": "bagua", "NCCL_NET_PLUGIN": str(nccl_net.path())},
    "bagua": {"NCCL_NET": "bagua", "BAGUA_NCCL_NET": "1"},
}
WORD = "NET/bagua"


def _results(dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    drawn = torch.Generator(device="cpu").manual_seed(rank)
    own = (8 * torch.rand(count * size, generator=drawn, device="cpu")).to(dtype).to(DEVICE)
    whole, part, joined, exchanged = own.clone(), own[:count].clone(), own.repeat(size), torch.zeros_like(own)
    dist.all_reduce(whole)
    dist.reduce_scatter_tensor(part, own)
    dist.all_gather_into_tensor(joined, own)
    dist.all_to_all_single(exchanged, own)
    sent, received = own.clone(), torch.zeros_like(own)
    dist.broadcast(sent, size - 1)
    ends = [
        dist.P2POp(dist.isend, own, (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ends):
        work.wait()
    return [whole, part, joined, exchanged, sent, received]


def bits() -> tuple[str, float]:
    """Return what the results of this rank are, and the seconds of a large reduction."""
    from check import fingerprint

    found = [result for dtype, count in itertools.product(DTYPES, COUNTS) for result in _results(dtype, count)]
    large = torch.ones(COUNTS[-1], device=DEVICE)
    settle()
    begin = time.perf_counter()
    for _ in range(5):
        dist.all_reduce(large)
    settle()
    return fingerprint(found), (time.perf_counter() - begin) / 5


def _over(size: int, backend: str, env: dict[str, str]) -> tuple[list[str], float, bool]:
    """Return the results of all ranks, the slowest's seconds, and whether NCCL spoke of our network."""
    from nccl_nets import bits as function  # by the name that ranks know it by

    hosts: dict[str, Any] = {"BAGUA_HOST_ID": [str(rank) for rank in range(size)]}
    log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
    with tempfile.TemporaryDirectory() as folder:
        pool = RankPool(size, backend, env={**hosts, **log, **env}, share_gpu=True, spawned=True, logs=Path(folder))
        with pool:
            told = pool.run(function, timeout=90.0)
        texts = [file.read_text(errors="replace") for file in Path(folder).rglob("*") if file.is_file()]
    return [one for one, _ in told], max(seconds for _, seconds in told), any(WORD in text for text in texts)


def main() -> int:
    size, wrong = int(sys.argv[1]), 0
    for backend, own in OWN.items():
        expected, seconds, _ = _over(size, backend, {"BAGUA_NCCL_NET": "0"})
        times = [f"sockets {1e3 * seconds:.2f}"]
        for name, env in (("plain", own), ("encrypted", {**own, **SECRET})):
            found, seconds, is_ours = _over(size, backend, env)
            times.append(f"{name} {1e3 * seconds:.2f}")
            if found != expected:
                times[-1] += " OTHER BITS"
            elif DEVICE == "cuda" and not is_ours:
                times[-1] += f" NO {WORD} IN THE LOG"
            else:
                continue
            wrong += 1
        print(f"{backend}: ms an all_reduce of {COUNTS[-1] >> 8} KiB: {', '.join(times)}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
