// SPDX-License-Identifier: Apache-2.0
// Packed chunks of a peer: any bytes, for every codec. What is decoded lies within the values that are decoded, and has
// the same bits on every instruction set; of the original's packets it is all NaN or all finite. A damaged scale of the
// other codecs may be so large that some values of a group become infinite. How many bytes have come, the collectives
// check.
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/codec.h"
#include "tests/fuzz/fuzzed_bytes.h"

namespace bagua {
namespace {

using fuzz::FuzzedBytes;

constexpr int64_t kMostElements = 4096;
constexpr int64_t kMostCopies = 40;

at::ScalarType dtypeOf(FuzzedBytes& input) {
  constexpr std::array kTypes = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};
  return kTypes.at(input.take<uint8_t>() % kTypes.size());
}

void checkGroups(const CodecInfo& info, const at::Tensor& values) {
  if (info.name != "minmax_uint8") return;
  const int64_t group = info.codec->layout().groupElements;
  for (int64_t begin = 0; begin < values.numel(); begin += group) {
    const at::Tensor part = values.narrow(0, begin, std::min(group, values.numel() - begin));
    TORCH_INTERNAL_ASSERT(part.isnan().all().item<bool>() || part.isfinite().all().item<bool>(), info.name,
                          " decodes a group to finite and other values");
  }
}

void decode(const CodecInfo& info, FuzzedBytes& input) {
  at::Tensor values = at::zeros({input.from(0, kMostElements)}, dtypeOf(input));
  const at::Tensor packed = input.tensor(info.codec->layout().packedBytes(values.numel()));
  info.codec->decode(packed, {0, values.numel()}, values);
  checkGroups(info, values);
  for (const auto& variant : info.variants) {
    at::Tensor other = at::full_like(values, 7);
    variant->decode(packed, {0, values.numel()}, other);
    TORCH_INTERNAL_ASSERT(
        values.numel() == 0 || std::memcmp(other.const_data_ptr(), values.const_data_ptr(), values.nbytes()) == 0,
        info.name, " decodes otherwise on another instruction set");
  }
}

void reduce(const CodecInfo& info, FuzzedBytes& input) {
  at::Tensor mean = at::zeros({input.from(0, kMostElements)}, dtypeOf(input));
  const int64_t bytes = info.codec->layout().packedBytes(mean.numel());
  const int64_t copies = input.from(1, kMostCopies);
  const auto divisor = static_cast<double>(input.from(1, 64));
  at::Tensor packed = at::zeros({bytes}, at::kByte);
  info.codec->decodeMeanAndEncode(input.tensor(copies * bytes).view({copies, bytes}), divisor, {}, mean, packed);
  info.codec->decode(packed, {0, mean.numel()}, mean);
  checkGroups(info, mean);
}

}  // namespace

void fuzzPackedChunks(FuzzedBytes& input) {
  const auto names = CodecRegistry::names();
  const CodecInfo& info = CodecRegistry::find(names[input.take<uint8_t>() % names.size()]);
  input.coin() ? decode(info, input) : reduce(info, input);
}

}  // namespace bagua

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer calls it so
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  bagua::fuzz::FuzzedBytes input(data, size);
  bagua::fuzzPackedChunks(input);
  return 0;
}
