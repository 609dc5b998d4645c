// SPDX-License-Identifier: Apache-2.0
#include "kernels/codecs/minmax_uint8/minmax_uint8.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <limits>

#include "kernels/codecs/minmax_uint8/minmax_uint8_cpu.h"
#include "kernels/codecs/minmax_uint8/minmax_uint8_kernels.h"
#include "kernels/integers.h"
#include "kernels/tensor_elements.h"
#if BAGUA_WITH_CUDA
#include "kernels/codecs/minmax_uint8/minmax_uint8_cuda_codec.h"
#endif

namespace bagua::minmax_uint8 {
namespace {

Layout layoutOf(int64_t length, int64_t chunks) { return {length, chunks, chunkLength(length, chunks)}; }

void checkPacked(const at::Tensor& packed, int64_t bytes, const char* operation, int64_t length, int64_t chunks) {
  TORCH_CHECK_TYPE(packed.scalar_type() == at::kByte, "minmax_uint8 ", operation,
                   " expects a packed tensor of uint8, got ", packed.scalar_type());
  TORCH_CHECK_VALUE(packed.numel() == bytes, "minmax_uint8 ", operation, ": ", length, " elements in ", chunks,
                    " chunks are packed into ", bytes, " bytes, got a packed tensor of ", packed.numel());
  TORCH_CHECK_VALUE(packed.is_contiguous(), "minmax_uint8 ", operation,
                    " expects a contiguous packed tensor, got strides ", packed.strides());
}

void checkDevices(const at::Tensor& a, const at::Tensor& b, const char* operation) {
  TORCH_CHECK_VALUE(a.device() == b.device(), "minmax_uint8 ", operation, " expects tensors of one device, got ",
                    a.device(), " and ", b.device());
  TORCH_CHECK_NOT_IMPLEMENTED(a.is_cpu() || a.is_cuda(), "minmax_uint8 ", operation,
                              " works on cpu and cuda tensors, got ", a.device());
#if !BAGUA_WITH_CUDA
  TORCH_CHECK_NOT_IMPLEMENTED(a.is_cpu(), "minmax_uint8 ", operation, ": this bagua was built without CUDA, got ",
                              a.device());
#endif
}

int64_t bytesOfChunks(int64_t chunks, int64_t chunkBytes, int64_t length) {
  TORCH_CHECK_VALUE(chunks <= std::numeric_limits<int64_t>::max() / chunkBytes, "minmax_uint8: ", chunks,
                    " chunks for ", length, " elements are too many");
  return chunks * chunkBytes;
}

void compressAs(const Layout& layout, const at::Tensor& x, at::Tensor& packed) {
  if (x.is_cuda()) {
    at::Tensor rows = packed.view({layout.chunks, layout.packedStride()});
    return onCuda().encodeChunks(x.view({-1}), layout.stride, {}, rows);
  }
  withElement(x.scalar_type(), "minmax_uint8 compress", [&](auto element) {
    using Element = decltype(element);
    cpu::compress(cpu::bestLoops(), dataOf<Element>(x), layout, nullptr, mutableDataOf<uint8_t>(packed));
  });
}

void decompressAs(const Layout& layout, const at::Tensor& packed, at::Tensor& output) {
  if (output.is_cuda()) {
    at::Tensor values = output.view({-1});
    return onCuda().decodeChunks(packed.view({layout.chunks, layout.packedStride()}), layout.stride, values);
  }
  withElement(output.scalar_type(), "minmax_uint8 decompress", [&](auto element) {
    using Element = decltype(element);
    cpu::decompress(cpu::bestLoops(), dataOf<uint8_t>(packed), layout, mutableDataOf<Element>(output));
  });
}

void checkOutput(const at::Tensor& output) {
  TORCH_CHECK_VALUE(output.is_contiguous(), "minmax_uint8 decompress expects a contiguous output, got shape ",
                    output.sizes(), " with strides ", output.strides());
}

}  // namespace

int64_t chunkLength(int64_t length, int64_t chunks) {
  TORCH_CHECK_VALUE(chunks > 0, "minmax_uint8 expects at least one chunk, got ", chunks, " for ", length, " elements");
  TORCH_CHECK_VALUE(length >= 0, "minmax_uint8 expects a length of zero or more, got ", length);
  return ceilDivide(length, chunks);
}

int64_t packedChunkBytes(int64_t chunkLength) {
  constexpr int64_t kLongest = std::numeric_limits<int64_t>::max() - kHeaderBytes - kAlignment;
  TORCH_CHECK_VALUE(0 <= chunkLength && chunkLength <= kLongest, "minmax_uint8 expects a chunk length from 0 to ",
                    kLongest, ", got ", chunkLength);
  return kHeaderBytes + roundUp(chunkLength, kAlignment);
}

int64_t packedBytes(int64_t length, int64_t chunks) {
  return bytesOfChunks(chunks, packedChunkBytes(chunkLength(length, chunks)), length);
}

void compress(const at::Tensor& input, int64_t chunks, at::Tensor& packed) {
  checkDevices(input, packed, "compress");
  const Layout layout = layoutOf(input.numel(), chunks);
  checkPacked(packed, packedBytes(layout.length, chunks), "compress", layout.length, chunks);
  compressAs(layout, input.contiguous(), packed);
}

void decompress(const at::Tensor& packed, int64_t chunks, at::Tensor& output) {
  checkDevices(packed, output, "decompress");
  const Layout layout = layoutOf(output.numel(), chunks);
  checkPacked(packed, packedBytes(layout.length, chunks), "decompress", layout.length, chunks);
  checkOutput(output);
  decompressAs(layout, packed, output);
}

// NOLINTNEXTLINE(readability-function-size): see the header.
void reduceAndCompress(const at::Tensor& received, int64_t copies, int64_t length, int64_t strideLength,
                       at::ScalarType dtype, double divisor, at::Tensor& packed) {
  TORCH_CHECK_VALUE(0 <= length && length <= strideLength, "minmax_uint8 reduceAndCompress expects a length from 0 to ",
                    strideLength, ", got ", length);
  // The sum is read twice, for its range and for its codes.
  at::Tensor sum = at::empty({length}, received.options().dtype(dtype));
  reduceAndCompress(received, copies, strideLength, divisor, sum, packed);
}

void reduceAndCompress(const at::Tensor& received, int64_t copies, int64_t strideLength, double divisor,
                       at::Tensor& sum, at::Tensor& packed) {
  const char* operation = "reduceAndCompress";
  checkDevices(received, packed, operation);
  checkDevices(received, sum, operation);
  TORCH_CHECK_VALUE(copies > 0, "minmax_uint8 reduceAndCompress expects at least one copy, got ", copies);
  TORCH_CHECK_VALUE(sum.is_contiguous() && sum.numel() <= strideLength,
                    "minmax_uint8 reduceAndCompress expects a contiguous sum of up to ", strideLength,
                    " elements, got shape ", sum.sizes(), " with strides ", sum.strides());
  const Layout layout = {sum.numel(), 1, strideLength};
  checkPacked(received, bytesOfChunks(copies, packedChunkBytes(strideLength), strideLength), operation, strideLength,
              copies);
  checkPacked(packed, packedChunkBytes(strideLength), operation, strideLength, 1);
  if (received.is_cuda()) {
    at::Tensor mean = sum.view({-1});
    at::Tensor result = packed.view({-1});
    return onCuda().decodeMeanAndEncode(received.view({copies, -1}), divisor, {}, mean, result);
  }
  withElement(sum.scalar_type(), "minmax_uint8 reduceAndCompress", [&](auto element) {
    using Element = decltype(element);
    const Received source = {dataOf<uint8_t>(received), copies, divisor};
    cpu::reduceAndCompress(cpu::bestLoops(), source, layout, mutableDataOf<Element>(sum),
                           mutableDataOf<uint8_t>(packed));
  });
}

PackedLayout packedLayout() {
  // Vectors read codes of a mean up to the next multiple of 32, so pieces begin there.
  return {.headerBytes = kHeaderBytes, .groupElements = kAlignment, .groupBytes = kAlignment, .alignment = 1};
}

const Codec& onCuda() {
#if BAGUA_WITH_CUDA
  static const cuda::CudaCodec kCodec(packedLayout(), cudaDevice());
  return kCodec;
#else
  TORCH_CHECK_NOT_IMPLEMENTED(false, "minmax_uint8: this bagua was built without CUDA");
#endif
}

}  // namespace bagua::minmax_uint8
