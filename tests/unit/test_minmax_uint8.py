# SPDX-License-Identifier: Apache-2.0
"""The 8-bit codec through torch.ops: golden vectors, wire layout, properties, edge cases, wrong input, tracing."""

import math

import bagua  # noqa: F401  (registers torch.ops.bagua)
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

compress = torch.ops.bagua.minmax_uint8_compress
decompress = torch.ops.bagua.minmax_uint8_decompress
reduce_and_compress = torch.ops.bagua.minmax_uint8_reduce_and_compress

HEADER = 32
FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
pytestmark = pytest.mark.any_device


def compute_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def round_trip(x: torch.Tensor, n_chunks: int = 1) -> torch.Tensor:
    out = torch.full_like(x, 7, memory_format=torch.contiguous_format)
    decompress(compress(x, n_chunks), out, n_chunks)
    return out


def chunk_stride(length: int, n_chunks: int) -> int:
    return -(-length // n_chunks)


def packed_stride(length: int, n_chunks: int) -> int:
    return HEADER + -(-chunk_stride(length, n_chunks) // 32) * 32


def reference_scale(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    # 255 / tensor would be 255 * tensor.reciprocal(), which rounds twice.
    return torch.tensor(255, dtype=low.dtype) / (high - low + torch.tensor(1e-7, dtype=low.dtype))


def reference_codes(x: torch.Tensor) -> torch.Tensor:
    """The original's formula, for a chunk that needs none of our departures."""
    values = x.to(compute_type(x.dtype))
    scale = reference_scale(values.min(), values.max())
    upper = torch.round(values.max() * scale)
    return (torch.minimum(torch.round(values * scale), upper) - (upper - 255)).clamp(0, 255).to(torch.uint8)


def reference_values(codes: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    scale = reference_scale(low, high)
    return (codes.to(low.dtype) + (torch.round(high * scale) - 255)) / scale


@pytest.mark.parametrize(
    ("values", "codes"),
    [
        ([-1, -0.5, 0, 0.25, 1], [0, 63, 127, 159, 255]),
        ([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], [0, 36, 73, 109, 146, 182, 219, 255]),
        ([-5, -4, -3, -1], [0, 64, 128, 255]),
        ([0, 0, 0], [255, 255, 255]),
    ],
)
def test_codes_are_those_of_the_original(values: list[float], codes: list[int]) -> None:
    packed = compress(torch.tensor(values, dtype=torch.float32), 1)
    assert packed[HEADER : HEADER + len(codes)].tolist() == codes


def test_values_are_those_of_the_original() -> None:
    x = torch.tensor([-1, -0.5, 0, 0.25, 1])
    expected = torch.tensor([-0.996078432, -0.501960814, 0, 0.250980407, 1.00392163])
    assert torch.equal(round_trip(x), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize(("length", "n_chunks"), [(1, 1), (31, 1), (33, 2), (1000, 3), (9, 4), (5, 8), (70001, 7)])
def test_packet_is_the_documented_layout(dtype: torch.dtype, length: int, n_chunks: int, device: str) -> None:
    x = torch.randn(length, generator=torch.Generator().manual_seed(length)).to(dtype)
    packed = compress(x.to(device), n_chunks).cpu()
    stride, size = chunk_stride(length, n_chunks), packed_stride(length, n_chunks)
    assert packed.shape == (n_chunks * size,)
    for index, chunk in enumerate(packed.view(n_chunks, size)):
        values = x[index * stride : (index + 1) * stride]
        header = chunk[: 2 * x.element_size()].clone().view(dtype)
        expected = torch.zeros(size, dtype=torch.uint8)
        if len(values) > 0:
            expected[: 2 * x.element_size()] = torch.stack([values.min(), values.max()]).view(torch.uint8)
            assert torch.equal(header, torch.stack([values.min(), values.max()]))
        if len(values) > 1:
            expected[HEADER : HEADER + len(values)] = reference_codes(values)
            assert torch.equal(chunk, expected)
        else:  # A single value is a constant; its code means nothing.
            expected[HEADER : HEADER + len(values)] = chunk[HEADER : HEADER + len(values)]
            assert torch.equal(chunk, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATING)
def test_values_follow_the_formula(dtype: torch.dtype, device: str) -> None:
    x = torch.randn(5003, generator=torch.Generator().manual_seed(1)).to(dtype)
    low, high = x.min().to(compute_type(dtype)), x.max().to(compute_type(dtype))
    expected = reference_values(reference_codes(x), low, high).to(dtype)
    assert torch.equal(round_trip(x.to(device)).cpu(), expected)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=200),
    st.integers(1, 9),
    st.sampled_from(FLOATING),
)
def test_error_is_at_most_half_a_step(values: list[float], n_chunks: int, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor(values, dtype=torch.float64).clamp(-largest, largest).to(dtype)
    result = round_trip(x, n_chunks)
    # Beside half a step: the roundings of x * scale and of the division, half an ulp of the largest magnitude each,
    # doubled beside a power of two, and half and bfloat16 round the result once more.
    epsilon = max(torch.finfo(dtype).eps, torch.finfo(compute_type(dtype)).eps)
    stride = chunk_stride(len(values), n_chunks)
    exact, decoded = x.double(), result.double()
    for piece, out in zip(exact.split(stride), decoded.split(stride), strict=True):
        # Halves, as the range of a double may be too large for a double.
        step = 2 * ((piece.max() / 2 - piece.min() / 2 + 1e-7) / 255)
        bound = step / 2 * (1 + 1e-6) + 2 * epsilon * (piece.abs().max() + step) + torch.finfo(dtype).tiny
        assert (out - piece).abs().max() <= bound


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("constant", [1.0, -1.0, 1e-3, 6e-8, -1e-5, 3e4, 0.0, -0.0])
def test_constant_chunk_decodes_to_itself(dtype: torch.dtype, constant: float, device: str) -> None:
    x = torch.full((77,), constant, dtype=dtype, device=device)
    assert torch.equal(round_trip(x, 2), x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("middle", [1.0, 1000.0, 65793.0, 1e7, 1e30])
@pytest.mark.parametrize("ulps", [1, 2, 100, 255, 300, 1000])
def test_narrow_range_never_wraps(middle: float, ulps: int, sign: int, device: str) -> None:
    base = torch.tensor(middle).view(torch.int32)
    x = sign * (base + torch.arange(ulps + 1, dtype=torch.int32)).view(torch.float32)
    spread = (x.max() - x.min()).double()
    error = (round_trip(x.to(device)).cpu().double() - x.double()).abs().max()
    assert error <= (spread + 1e-7) / 510 + 2 * spread / ulps  # Two ulps, see above.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 17, 499])
def test_non_finite_value_makes_its_chunk_non_finite(
    dtype: torch.dtype, poison: float, position: int, device: str
) -> None:
    x = torch.randn(1500, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[500 + position] = poison
    out = round_trip(x.to(device), 3).cpu()
    assert not out[500:1000].isfinite().any()
    assert out[:500].isfinite().all()
    assert out[1000:].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATING)
def test_range_beyond_the_largest_number_stays_finite(dtype: torch.dtype, device: str) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([-largest, 0, largest / 3, largest], dtype=dtype, device=device)
    error = round_trip(x).double() / largest - x.double() / largest
    assert error.abs().max() <= 1.01 / 255


@pytest.mark.parametrize("dtype", FLOATING)
def test_any_view_gives_the_bytes_of_its_copy(dtype: torch.dtype) -> None:
    x = torch.randn(64, 48).to(dtype)
    for view in (x.t(), x[:, 1:], x[3:, ::2], x.flatten()[1:], x.flatten()[7:1000]):
        for n_chunks in (1, 3):
            packed = compress(view, n_chunks)
            assert torch.equal(packed, compress(view.clone(memory_format=torch.contiguous_format), n_chunks))
            out = torch.empty(view.numel() + 3, dtype=dtype)[3:].view(view.shape)
            decompress(torch.cat([packed[:1], packed])[1:], out, n_chunks)
            assert torch.equal(out, round_trip(view, n_chunks))


def test_result_does_not_depend_on_the_number_of_threads() -> None:
    x = torch.randn(500_003)
    threads = torch.get_num_threads()
    try:
        for n_chunks in (1, 2, 5, 999):
            torch.set_num_threads(1)
            alone, decoded = compress(x, n_chunks), round_trip(x, n_chunks)
            torch.set_num_threads(4)
            assert torch.equal(compress(x, n_chunks), alone)
            assert torch.equal(round_trip(x, n_chunks), decoded)
    finally:
        torch.set_num_threads(threads)


def test_empty_tensor() -> None:
    packed = compress(torch.empty(0), 3)
    assert packed.tolist() == [0] * 96
    decompress(packed, torch.empty(0), 3)


@pytest.mark.parametrize("n_chunks", [0, -1])
def test_chunk_count_must_be_positive(n_chunks: int) -> None:
    with pytest.raises(ValueError, match=f"got {n_chunks} for 6 elements"):
        compress(torch.ones(6), n_chunks)
    with pytest.raises(ValueError, match=f"got {n_chunks} for 6 elements"):
        decompress(torch.zeros(64, dtype=torch.uint8), torch.ones(6), n_chunks)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.complex64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="expects float32, float64, float16 or bfloat16, got"):
        compress(torch.ones(4).to(dtype), 1)
    with pytest.raises(TypeError, match="expects float32, float64, float16 or bfloat16, got"):
        decompress(torch.zeros(64, dtype=torch.uint8), torch.ones(4).to(dtype), 1)


def test_packed_tensor_must_fit() -> None:
    out = torch.empty(100)
    with pytest.raises(ValueError, match=r"100 elements in 2 chunks are packed into 192 bytes, got .* 191"):
        decompress(torch.zeros(191, dtype=torch.uint8), out, 2)
    with pytest.raises(TypeError, match="uint8, got Float"):
        decompress(torch.zeros(192), out, 2)
    with pytest.raises(ValueError, match="contiguous packed"):
        decompress(torch.zeros(384, dtype=torch.uint8)[::2], out, 2)
    with pytest.raises(ValueError, match="contiguous output"):
        decompress(torch.zeros(192, dtype=torch.uint8), torch.empty(100, 2)[:, 0], 2)
    with pytest.raises(ValueError, match="one device"):
        decompress(torch.zeros(192, dtype=torch.uint8, device="meta"), out, 2)


def in_lanes(copies: list[torch.Tensor]) -> torch.Tensor:
    """The sum, in the original's order."""
    lanes = 2
    while lanes < 32 and len(copies) > 2 * lanes:
        lanes *= 2
    sums = [torch.zeros_like(copies[0], dtype=compute_type(copies[0].dtype)) for _ in range(lanes)]
    for rank, copy in enumerate(copies):
        sums[rank % lanes] += copy
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [one + other for one, other in zip(sums[:half], sums[half:], strict=True)]
    return sums[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("n_copies", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("length", [1, 33, 8193])
def test_a_reduction_codes_the_quotient_of_the_sum(length: int, n_copies: int, dtype: torch.dtype, device: str) -> None:
    packed = [compress(torch.randn(length).to(dtype), 1) for _ in range(n_copies)]
    decoded = [torch.empty(length, dtype=dtype) for _ in packed]
    for one, out in zip(packed, decoded, strict=True):
        decompress(one, out, 1)
    expected = compress((in_lanes(decoded) / 3.0).to(dtype), 1)
    reduced = reduce_and_compress(torch.cat(packed).to(device), n_copies, length, dtype, 3.0)
    assert torch.equal(reduced.cpu(), expected)


def test_what_is_reduced_must_be_whole_chunks() -> None:
    with pytest.raises(ValueError, match="at least one copy, got 0"):
        reduce_and_compress(torch.zeros(64, dtype=torch.uint8), 0, 32, torch.float32, 1.0)
    with pytest.raises(ValueError, match="got a packed tensor of 129"):
        reduce_and_compress(torch.zeros(129, dtype=torch.uint8), 2, 32, torch.float32, 1.0)
    with pytest.raises(ValueError, match="a length from 0 to 32, got 33"):
        reduce_and_compress(torch.zeros(128, dtype=torch.uint8), 2, 33, torch.float32, 1.0)
    with pytest.raises(TypeError, match="expects float32, float64, float16 or bfloat16, got"):
        reduce_and_compress(torch.zeros(128, dtype=torch.uint8), 2, 32, torch.int32, 1.0)


@pytest.mark.parametrize("dtype", FLOATING)
def test_operators_pass_the_checks_of_torch(dtype: torch.dtype) -> None:
    x = torch.randn(101).to(dtype)
    packed = compress(x, 3)
    torch.library.opcheck(compress.default, (x, 3))
    torch.library.opcheck(decompress.default, (packed, torch.empty_like(x), 3))
    torch.library.opcheck(reduce_and_compress.default, (packed, 3, 34, dtype, 3.0))


def test_operators_trace_with_symbolic_lengths() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        decompress(compress(x, 4), out, 4)
        return out * 2

    traced = torch.compile(twice, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (100, 1001):
        x = torch.randn(length)
        assert torch.equal(traced(x), twice(x))


@NEEDS_GPU
@pytest.mark.parametrize("dtype", FLOATING)
def test_cuda_bytes_equal_cpu_bytes(dtype: torch.dtype) -> None:
    for length in (1, 255, 8193, 1_000_003, 30_000_001):
        x = torch.randn(length + 1).to(dtype)[1:]  # Not aligned to 16 bytes.
        on_cuda = torch.cat([x[:1], x]).cuda()[1:]
        for n_chunks in (1, 3, 8, 5000):
            packed = compress(x, n_chunks)
            assert torch.equal(compress(on_cuda, n_chunks).cpu(), packed)
            assert torch.equal(round_trip(on_cuda, n_chunks).cpu(), round_trip(x, n_chunks))


@NEEDS_GPU
def test_cuda_calls_can_be_captured() -> None:
    x = torch.randn(100_000, device="cuda")
    out = torch.empty_like(x)
    decompress(compress(x, 4), out, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decompress(compress(x, 4), out, 4)
    x.normal_()
    graph.replay()
    assert torch.equal(out, round_trip(x, 4))
