// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <cstdlib>

#include "kernels/codecs/minmax_uint8/minmax_uint8.h"
#include "kernels/device_ways.h"

// torch.ops.bagua.minmax_uint8_*: there once libbagua is loaded.
namespace bagua::minmax_uint8 {
namespace {

void checkFloating(at::ScalarType dtype, const char* operation) {
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16,
                   "minmax_uint8 ", operation, " expects float32, float64, float16 or bfloat16, got ", dtype);
}

constexpr int64_t kHugePageBytes = int64_t{2} << 20;
// From here on the C library returns freed memory to the system, so that every result is made of fresh pages.
constexpr int64_t kFreshPagesBytes = int64_t{4} << 20;

// Fresh pages of 4 KiB cost more than the coding: 7.5 of 12 ms for 64 MiB of float32. Huge pages are a wish that the
// system may ignore.
at::Tensor emptyOnHugePages(int64_t bytes) {
  const auto size = static_cast<size_t>((bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes);
  void* memory = std::aligned_alloc(kHugePageBytes, size);
  TORCH_CHECK_WITH(OutOfMemoryError, memory != nullptr, "minmax_uint8 compress cannot allocate ", bytes, " bytes");
  madvise(memory, size, MADV_HUGEPAGE);
  return at::from_blob(
      memory, {bytes}, [](void* allocated) { std::free(allocated); }, at::kByte);
}

at::Tensor emptyPacked(const at::Tensor& x, int64_t chunks) {
  checkFloating(x.scalar_type(), "compress");
  const int64_t bytes = packedBytes(x.numel(), chunks);
  if (worksOnCpu(x) && bytes >= kFreshPagesBytes) return emptyOnHugePages(bytes);
  return at::empty({bytes}, x.options().dtype(at::kByte).memory_format(at::MemoryFormat::Contiguous));
}

at::Tensor compressOp(const at::Tensor& x, int64_t chunks) {
  at::Tensor packed = emptyPacked(x, chunks);
  compress(x, chunks, packed);
  return packed;
}

// The length as a symbol where it is one, so that traces hold for every length.
at::Tensor compressMeta(const at::Tensor& x, int64_t chunks) {
  checkFloating(x.scalar_type(), "compress");
  TORCH_CHECK_VALUE(chunks > 0, "minmax_uint8 expects at least one chunk, got ", chunks, " for ", x.sym_numel(),
                    " elements");
  const c10::SymInt chunkLength = (x.sym_numel() + (chunks - 1)) / chunks;
  const c10::SymInt chunkBytes = (chunkLength + 31) / 32 * 32 + 32;
  return at::empty_symint({chunkBytes * chunks}, x.options().dtype(at::kByte));
}

void decompressOp(const at::Tensor& packed, at::Tensor& out, int64_t chunks) { decompress(packed, chunks, out); }

void decompressMeta(const at::Tensor& packed, at::Tensor& out, int64_t chunks) {
  checkFloating(out.scalar_type(), "decompress");
  TORCH_CHECK_TYPE(packed.scalar_type() == at::kByte, "minmax_uint8 decompress expects a packed tensor of uint8, got ",
                   packed.scalar_type());
  TORCH_CHECK_VALUE(packed.device() == out.device(), "minmax_uint8 decompress expects tensors of one device, got ",
                    packed.device(), " and ", out.device());
  TORCH_CHECK_VALUE(chunks > 0, "minmax_uint8 expects at least one chunk, got ", chunks, " for ", out.sym_numel(),
                    " elements");
}

void checkCopies(int64_t copies) {
  TORCH_CHECK_VALUE(copies > 0, "minmax_uint8 reduceAndCompress expects at least one copy, got ", copies);
}

// `received` tells how long a chunk is packed, up to the padding, which changes no byte of the result.
at::Tensor reduceAndCompressOp(const at::Tensor& received, int64_t copies, int64_t length, at::ScalarType dtype,
                               double divisor) {
  checkCopies(copies);
  const int64_t chunkBytes = received.numel() / copies;
  const int64_t strideLength = chunkBytes - packedChunkBytes(0);
  at::Tensor packed = at::empty({chunkBytes}, received.options().memory_format(at::MemoryFormat::Contiguous));
  reduceAndCompress(received, copies, length, strideLength, dtype, divisor, packed);
  return packed;
}

at::Tensor reduceAndCompressMeta(const at::Tensor& received, int64_t copies, int64_t length, at::ScalarType dtype,
                                 double /*divisor*/) {
  checkCopies(copies);
  checkFloating(dtype, "reduce_and_compress");
  TORCH_CHECK_VALUE(length >= 0, "minmax_uint8: a chunk cannot have ", length, " elements");
  return at::empty_symint({received.sym_numel() / copies}, received.options());
}

TORCH_LIBRARY_FRAGMENT(bagua, m) {
  m.def("minmax_uint8_compress(Tensor x, int n_chunks) -> Tensor");
  m.def("minmax_uint8_decompress(Tensor packed, Tensor(a!) out, int n_chunks) -> ()");
  m.def(
      "minmax_uint8_reduce_and_compress(Tensor received, int n_copies, int length, ScalarType dtype, float divisor) "
      "-> Tensor");
}

TORCH_LIBRARY_IMPL(bagua, CPU, m) {
  m.impl("minmax_uint8_compress", compressOp);
  m.impl("minmax_uint8_decompress", decompressOp);
  m.impl("minmax_uint8_reduce_and_compress", reduceAndCompressOp);
}

TORCH_LIBRARY_IMPL(bagua, CUDA, m) {
  m.impl("minmax_uint8_compress", compressOp);
  m.impl("minmax_uint8_decompress", decompressOp);
  m.impl("minmax_uint8_reduce_and_compress", reduceAndCompressOp);
}

TORCH_LIBRARY_IMPL(bagua, Meta, m) {
  m.impl("minmax_uint8_compress", compressMeta);
  m.impl("minmax_uint8_decompress", decompressMeta);
  m.impl("minmax_uint8_reduce_and_compress", reduceAndCompressMeta);
}

}  // namespace
}  // namespace bagua::minmax_uint8
