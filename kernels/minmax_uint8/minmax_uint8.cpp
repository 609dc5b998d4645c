// SPDX-License-Identifier: Apache-2.0
#include "kernels/minmax_uint8/minmax_uint8.h"

#include <ATen/ATen.h>

#include <limits>

#include "kernels/integers.h"
#include "kernels/minmax_uint8/minmax_uint8_cpu.h"
#include "kernels/minmax_uint8/minmax_uint8_kernels.h"
#include "kernels/tensor_elements.h"
#if BAGUA_WITH_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include "kernels/minmax_uint8/minmax_uint8_cuda.h"
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

// That of a row of `packed` per chunk.
Layout layoutOfRows(const at::Tensor& packed, int64_t chunkLength, int64_t length, const char* operation) {
  TORCH_CHECK_VALUE(packed.dim() == 2 && packed.size(1) == packedChunkBytes(chunkLength), "minmax_uint8 ", operation,
                    " expects rows of ", packedChunkBytes(chunkLength), " bytes for chunks of ", chunkLength,
                    " elements, got a packed tensor of shape ", packed.sizes());
  const int64_t chunks = packed.size(0);
  TORCH_CHECK_VALUE(length == 0 || (chunkLength > 0 && chunks >= ceilDivide(length, chunkLength)), "minmax_uint8 ",
                    operation, ": ", length, " elements are more than ", chunks, " chunks of ", chunkLength);
  checkPacked(packed, packed.numel(), operation, length, chunks);
  return {length, chunks, chunkLength};
}

#if BAGUA_WITH_CUDA
// Taken from ATen's allocator before the launch, on the current stream, which also makes it safe under graph capture.
template <class Element>
at::Tensor workspaceFor(const at::Tensor& like, const Layout& layout) {
  return at::empty({cuda::workspaceBytes<Element>(layout)}, like.options().dtype(at::kByte));
}
#endif

Feedback feedbackOf(const Encoding& encoding) {
  if (!encoding.hasFeedback()) return {};
  return {encoding.residual.const_data_ptr<float>(), encoding.nextResidual.mutable_data_ptr<float>()};
}

void checkFeedback(const Encoding& encoding, const at::Tensor& input) {
  if (!encoding.hasFeedback()) return;
  for (const at::Tensor& residual : {encoding.residual, encoding.nextResidual}) {
    TORCH_CHECK_VALUE(residual.scalar_type() == at::kFloat && residual.is_contiguous() &&
                          residual.numel() == input.numel() && residual.device() == input.device(),
                      "minmax_uint8 compress expects residuals of ", input.numel(), " contiguous float32 on ",
                      input.device(), ", got shape ", residual.sizes(), " of ", residual.scalar_type(), " on ",
                      residual.device());
  }
}

void compressAs(const Layout& layout, const at::Tensor& x, const Encoding& encoding, at::Tensor& packed) {
  const Feedback feedback = feedbackOf(encoding);
  withElement(x.scalar_type(), "minmax_uint8 compress", [&](auto element) {
    using Element = decltype(element);
    const auto* data = static_cast<const Element*>(x.const_data_ptr());
    auto* bytes = packed.mutable_data_ptr<uint8_t>();
#if BAGUA_WITH_CUDA
    if (x.is_cuda()) {
      const c10::cuda::CUDAGuard guard(x.device());
      const at::Tensor workspace = workspaceFor<Element>(x, layout);
      const auto stream = at::cuda::getCurrentCUDAStream();
      C10_CUDA_CHECK(encoding.hasFeedback()
                         ? cuda::compressSums(data, layout, feedback, bytes, workspace.mutable_data_ptr(), stream)
                         : cuda::compress(data, layout, bytes, workspace.mutable_data_ptr(), stream));
      return;
    }
#endif
    cpu::compress(cpu::bestLoops(), data, layout, encoding.hasFeedback() ? &feedback : nullptr, bytes);
  });
}

void decompressAs(const Layout& layout, const at::Tensor& packed, at::Tensor& output) {
  withElement(output.scalar_type(), "minmax_uint8 decompress", [&](auto element) {
    using Element = decltype(element);
    auto* data = static_cast<Element*>(output.mutable_data_ptr());
    const auto* bytes = packed.const_data_ptr<uint8_t>();
#if BAGUA_WITH_CUDA
    if (output.is_cuda()) {
      const c10::cuda::CUDAGuard guard(output.device());
      C10_CUDA_CHECK(cuda::decompress(bytes, layout, data, at::cuda::getCurrentCUDAStream()));
      return;
    }
#endif
    cpu::decompress(cpu::bestLoops(), bytes, layout, data);
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
  compressAs(layout, input.contiguous(), {}, packed);
}

void compressChunks(const at::Tensor& input, int64_t chunkLength, const Encoding& encoding, at::Tensor& packed) {
  checkDevices(input, packed, "compress");
  checkFeedback(encoding, input);
  compressAs(layoutOfRows(packed, chunkLength, input.numel(), "compress"), input.contiguous(), encoding, packed);
}

void decompress(const at::Tensor& packed, int64_t chunks, at::Tensor& output) {
  checkDevices(packed, output, "decompress");
  const Layout layout = layoutOf(output.numel(), chunks);
  checkPacked(packed, packedBytes(layout.length, chunks), "decompress", layout.length, chunks);
  checkOutput(output);
  decompressAs(layout, packed, output);
}

void decompressChunks(const at::Tensor& packed, int64_t chunkLength, at::Tensor& output) {
  checkDevices(packed, output, "decompress");
  const Layout layout = layoutOfRows(packed, chunkLength, output.numel(), "decompress");
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
  withElement(sum.scalar_type(), "minmax_uint8 reduceAndCompress", [&](auto element) {
    using Element = decltype(element);
    auto* sums = static_cast<Element*>(sum.mutable_data_ptr());
    const Received source = {received.const_data_ptr<uint8_t>(), copies, divisor};
    auto* result = packed.mutable_data_ptr<uint8_t>();
#if BAGUA_WITH_CUDA
    if (received.is_cuda()) {
      const c10::cuda::CUDAGuard guard(received.device());
      const at::Tensor workspace = workspaceFor<Element>(received, layout);
      C10_CUDA_CHECK(cuda::reduceAndCompress(source, layout, sums, result, workspace.mutable_data_ptr(),
                                             at::cuda::getCurrentCUDAStream()));
      return;
    }
#endif
    cpu::reduceAndCompress(cpu::bestLoops(), source, layout, sums, result);
  });
}

}  // namespace bagua::minmax_uint8
