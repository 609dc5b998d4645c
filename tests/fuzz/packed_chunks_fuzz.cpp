// SPDX-License-Identifier: Apache-2.0
// Packed chunks of a peer: any bytes, with any claim about how many chunks and elements they hold. What is refused is
// refused with an exception; what is decoded is all NaN or all finite, and the same bits on every instruction set.
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstring>

#include "kernels/codecs/minmax_uint8/minmax_uint8.h"
#include "kernels/codecs/minmax_uint8/minmax_uint8_cpu.h"
#include "tests/fuzz/fuzzed_bytes.h"

namespace bagua::minmax_uint8 {
namespace {

using fuzz::FuzzedBytes;

constexpr int64_t kMostElements = 4096;
constexpr int64_t kMostBytes = int64_t{1} << 20;

at::ScalarType dtypeOf(FuzzedBytes& input) {
  constexpr std::array kTypes = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};
  return kTypes.at(input.take<uint8_t>() % kTypes.size());
}

// As many bytes as `wanted`, if that is a size, or as many as there are.
at::Tensor packedOf(FuzzedBytes& input, bool fits, int64_t wanted) {
  return input.tensor(fits && wanted <= kMostBytes ? wanted : static_cast<int64_t>(input.left()));
}

void checkChunks(const at::Tensor& output, int64_t chunks) {
  const int64_t stride = chunkLength(output.numel(), chunks);
  for (int64_t begin = 0; begin < output.numel(); begin += stride) {
    const at::Tensor chunk = output.narrow(0, begin, std::min(stride, output.numel() - begin));
    TORCH_INTERNAL_ASSERT(chunk.isnan().all().item<bool>() || chunk.isfinite().all().item<bool>(),
                          "a chunk is decoded to finite and other values");
  }
}

template <class Element>
void compareSets(const at::Tensor& packed, int64_t chunks, const at::Tensor& output) {
  const Layout layout{output.numel(), chunks, chunkLength(output.numel(), chunks)};
  for (const cpu::Loops* loops : cpu::availableLoops()) {
    const at::Tensor other = at::zeros_like(output);
    cpu::decompress(*loops, packed.const_data_ptr<uint8_t>(), layout, static_cast<Element*>(other.mutable_data_ptr()));
    TORCH_INTERNAL_ASSERT(std::memcmp(other.const_data_ptr(), output.const_data_ptr(), output.nbytes()) == 0,
                          loops->name, " decodes otherwise than the set in use");
  }
}

void decode(FuzzedBytes& input) {
  at::Tensor output = at::zeros({input.from(0, kMostElements)}, at::TensorOptions().dtype(dtypeOf(input)));
  const int64_t chunks = input.claim();
  const bool fits = input.coin();
  const at::Tensor packed = packedOf(input, fits, fits ? packedBytes(output.numel(), chunks) : 0);
  decompress(packed, chunks, output);
  if (output.numel() == 0) return;
  checkChunks(output, chunks);
  switch (output.scalar_type()) {
    case at::kFloat:
      return compareSets<float>(packed, chunks, output);
    case at::kDouble:
      return compareSets<double>(packed, chunks, output);
    case at::kHalf:
      return compareSets<HalfBits>(packed, chunks, output);
    default:
      return compareSets<BFloat16Bits>(packed, chunks, output);
  }
}

void reduce(FuzzedBytes& input) {
  const auto dtype = dtypeOf(input);
  const int64_t copies = input.claim();
  const int64_t stride = input.claim();
  const int64_t length = input.coin() ? input.from(0, kMostElements) : input.claim();
  const auto divisor = static_cast<float>(input.from(1, 64));
  const bool fits = input.coin() && copies > 0 && copies <= 64 && stride >= 0 && stride <= kMostElements;
  at::Tensor packed = at::zeros({fits ? packedChunkBytes(stride) : input.from(0, kMostElements)}, at::kByte);
  const at::Tensor received = packedOf(input, fits, fits ? copies * packedChunkBytes(stride) : 0);
  reduceAndCompress(received, copies, length, stride, dtype, divisor, packed);
  at::Tensor output = at::zeros({length}, at::TensorOptions().dtype(dtype));
  decompress(packed.narrow(0, 0, packedBytes(length, 1)), 1, output);
  if (length > 0) checkChunks(output, 1);
}

}  // namespace

void fuzzPackedChunks(FuzzedBytes& input) {
  try {
    input.coin() ? decode(input) : reduce(input);
  } catch (const c10::ValueError&) {
    // What does not fit together is refused.
    return;
  }
}

}  // namespace bagua::minmax_uint8

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer calls it so
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  bagua::fuzz::FuzzedBytes input(data, size);
  bagua::minmax_uint8::fuzzPackedChunks(input);
  return 0;
}
