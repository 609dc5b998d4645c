# SPDX-License-Identifier: Apache-2.0
"""Every codec on long, unaligned and non-finite tensors, which the C++ contract program does not have.

On CUDA the results have to be those of the CPU, to the bit; of finite values what is decoded is near on either device.
"""

import itertools

import bagua
import torch
from built import built
from check import Differences, check
from checks_transport import COARSENESS
from devices import DEVICE
from torch import Tensor

LENGTHS = ((1_000_003, 3), (4_194_304, 8), (255, 2)) if DEVICE == "cuda" else ((60_003, 3), (255, 2))
SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-42, 3e38)


def _values(length: int, dtype: torch.dtype, *, is_finite: bool) -> Tensor:
    drawn = torch.randn(length, generator=torch.Generator().manual_seed(length), device="cpu") + 0.5
    for index, value in enumerate(() if is_finite else SPECIAL):
        drawn[index * 1009 :: len(SPECIAL) * 1009 + 1] = value
    return drawn.to(dtype)


def _coded(codec: str, values: Tensor, residual: Tensor | None, chunks: int) -> list[Tensor]:
    """Packed bytes, decoded values, what is left of the residual, and mean and packed mean of three copies."""
    of, length = torch.ops.codec_operators, values.numel()
    packed = torch.full((chunks, of.packed_bytes(codec, -(-length // chunks))), 0xA5, dtype=torch.uint8)
    of.encode(codec, values, residual, packed)
    decoded, rows = torch.full_like(values, 7), torch.full((3, of.packed_bytes(codec, length)), 0xA5, dtype=torch.uint8)
    of.decode(codec, packed, decoded)
    for row, factor in zip(rows, (1.0, -0.5, 0.25), strict=True):
        of.encode(codec, values * factor, None, row[None])
    mean, again = torch.full_like(values, 7), torch.full_like(rows[0], 0xA5)
    of.mean(codec, rows, mean, again)
    return [packed, decoded, mean, again, *([] if residual is None else [residual])]


@check({codec: (codec,) for codec in bagua.available_codecs()}, sizes=(1,), seconds=30)
def codec_codes_as_the_cpu_does(codec: str) -> str:
    torch.ops.load_library(built("libcodec_operators.so"))
    found = Differences()
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    for dtype, (length, chunks), is_finite, shift, has_residual in itertools.product(
        dtypes, LENGTHS, (True, False), (0, 1), (False, True)
    ):
        whole, owed = _values(length + 1, dtype, is_finite=is_finite), 0.1 * torch.randn(length + 1, device="cpu")
        chosen = slice(shift, shift + length)  # aligned and not
        sides = []
        for device in (torch.get_default_device(), torch.device("cpu")):
            residual = owed.to(device, copy=True)[chosen] if has_residual else None
            with device:
                sides.append(_coded(codec, whole.to(device)[chosen], residual, chunks))
        on_device, on_cpu = sides
        label = f"{dtype} {length}/{chunks} at {shift} finite {is_finite} feedback {has_residual}"
        names = ("packed", "decoded", "mean", "packed mean", "residual")
        for name, one, other in zip(names, on_device, on_cpu, strict=False):
            found.same(f"{label} {name}", one, other)
        if is_finite:
            values = whole[chosen].double()
            coded = values + owed[chosen] if has_residual else values
            found.near(f"{label} decoded", on_device[1], coded, COARSENESS[codec])
            found.near(f"{label} mean", on_device[2], 0.25 * values, COARSENESS[codec])
            if has_residual:
                found.near(f"{label} residual", on_device[4].cpu().double() + on_device[1].cpu().double(), coded, 0.01)
    return found.verdict()
