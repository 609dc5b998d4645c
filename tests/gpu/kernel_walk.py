# SPDX-License-Identifier: Apache-2.0
"""One rank that takes every kernel through short lengths, at the edges of blocks: for compute-sanitizer.

    python tests/gpu/kernel_walk.py DEVICE RANK RANKS STORE    # DEVICE: cpu or cuda:0; STORE: a file of all ranks

One rank walks through minmax_uint8 and its fused reduction by themselves, several also through what happens to a
gradient, with every codec.
"""

import sys

import bagua
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

# About vectors of 4 and 8 elements, blocks of 256 threads, and parts of 8192 elements.
LENGTHS = (1, 3, 8, 255, 257, 1025, 8191, 8193, 70_001)
CHUNKS = (1, 2, 3, 7)
# For 2, 4, 8, 16 and 32 lanes, and twice as many copies as there are lanes at most.
COPIES = (1, 3, 5, 16, 20, 40, 70)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def walk_codec(device: str) -> int:
    compress, decompress = torch.ops.bagua.minmax_uint8_compress, torch.ops.bagua.minmax_uint8_decompress
    cases = 0
    for dtype in DTYPES:
        for length in LENGTHS:
            whole = torch.randn(length + 1).to(dtype).to(device)
            for x in (whole[:length], whole[1:]):  # aligned and not
                for chunks in CHUNKS:
                    out = torch.zeros_like(x)
                    decompress(compress(x, chunks), out, chunks)
                    assert out.isfinite().all()
                    cases += 1
    return cases


def walk_fused_reduction(device: str) -> int:
    compress, reduce = torch.ops.bagua.minmax_uint8_compress, torch.ops.bagua.minmax_uint8_reduce_and_compress
    cases = 0
    for dtype in DTYPES:
        for length in LENGTHS:
            # initcheck looks at our kernels only, and takes what others have written for missing: inputs are copied.
            packed = compress(torch.ones(length, dtype=dtype).to(device), 1)
            for copies in COPIES:
                copied = packed.cpu().repeat(copies).to(device)
                # The mean of equal copies has the same code.
                assert torch.equal(reduce(copied, copies, length, dtype, float(copies)), packed)
                cases += 1
    return cases


def walk_reduction(device: str) -> int:
    cases = 0
    for dtype in DTYPES:
        for length in LENGTHS:
            model = torch.nn.Linear(length, 1, bias=False, device=device, dtype=dtype)
            ddp = DDP(model)
            bagua.register_comm_hook(ddp, "bytegrad", hierarchical=False)
            ddp(torch.ones(1, length, device=device, dtype=dtype)).sum().backward()
            assert model.weight.grad is not None
            torch.testing.assert_close(model.weight.grad, torch.ones_like(model.weight), rtol=0.01, atol=0)
            cases += 1
    return cases


def walk_feedback(device: str) -> int:
    """Every codec with residuals, of which the second step has some."""
    cases = 0
    for codec in bagua.available_codecs():
        for dtype in DTYPES:
            for length in LENGTHS:
                model = torch.nn.Linear(length, 1, bias=False, device=device, dtype=dtype)
                ddp = DDP(model)
                bagua.register_comm_hook(ddp, "quantized_allreduce", codec=codec, exact=(), hierarchical=False)
                for _ in range(2):
                    ddp(torch.ones(1, length, device=device, dtype=dtype)).sum().backward()
                assert model.weight.grad is not None
                assert model.weight.grad.isfinite().all()
                cases += 1
    return cases


def main(device: str, rank: int, size: int, store: str) -> None:
    if device != "cpu":
        torch.cuda.set_device(device)
    cases = walk_codec(device) + walk_fused_reduction(device)
    if size > 1:
        file = dist.FileStore(store, size)  # type: ignore[attr-defined]
        dist.init_process_group("bagua", store=file, rank=rank, world_size=size)
        cases += walk_reduction(device) + walk_feedback(device)
        dist.destroy_process_group()
    print(f"walked {cases} cases")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
