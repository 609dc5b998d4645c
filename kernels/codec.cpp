// SPDX-License-Identifier: Apache-2.0
#include "kernels/codec.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

#include "kernels/share_out.h"

namespace bagua {
namespace {

// Elements of a block of a mean: its sums stay in a cache. Rounded up to whole groups.
constexpr int64_t kBlock = 16384;

int64_t ceilDivide(int64_t value, int64_t by) { return value / by + (value % by != 0 ? 1 : 0); }

// The finaliser of SplitMix64: neighbouring numbers give unrelated ones.
uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31U);
}

// A function's static: usable from the initialisers of other files, whatever their order.
std::map<std::string, CodecInfo>& codecs() {
  static std::map<std::string, CodecInfo> all;
  return all;
}

// Calls visit(chunk, begin, length) for every row of `packed`.
template <class Visit>
void forChunks(const at::Tensor& values, int64_t chunkLength, const at::Tensor& packed, const Visit& visit) {
  const int64_t length = values.numel();
  for (int64_t row = 0; row < packed.size(0); ++row) {
    const int64_t begin = std::min(row * chunkLength, length);
    visit(row, begin, std::min(chunkLength, length - begin));
  }
}

}  // namespace

int64_t PackedLayout::packedBytes(int64_t length) const {
  return ceilDivide(headerBytes + ceilDivide(length, groupElements) * groupBytes, alignment) * alignment;
}

Piece PackedLayout::begunIn(int64_t beginByte, int64_t endByte, int64_t length) const {
  const auto elementsBefore = [&](int64_t byte) {
    const int64_t groups = ceilDivide(std::max<int64_t>(byte - headerBytes, 0), groupBytes);
    return std::min(groups * groupElements, length);
  };
  return {elementsBefore(beginByte), elementsBefore(endByte)};
}

Piece PackedLayout::endedIn(int64_t beginByte, int64_t endByte, int64_t length) const {
  const auto elementsBefore = [&](int64_t byte) {
    const int64_t groups = std::max<int64_t>(byte - headerBytes, 0) / groupBytes;
    return std::min(groups * groupElements, length);
  };
  return {elementsBefore(beginByte), elementsBefore(endByte)};
}

Encoding Encoding::narrow(int64_t begin, int64_t length) const {
  Encoding part = *this;
  part.key = mix(key ^ mix(static_cast<uint64_t>(begin)));
  if (hasFeedback()) {
    part.residual = residual.narrow(0, begin, length);
    part.nextResidual = nextResidual.narrow(0, begin, length);
  }
  return part;
}

void Codec::decodeMean(const at::Tensor& copies, const Piece& piece, double divisor, const Encoding& encoding,
                       at::Tensor& mean, at::Tensor& packed) const {
  const at::ScalarType dtype = mean.scalar_type();
  const auto options = mean.options().dtype(dtype == at::kDouble ? at::kDouble : at::kFloat);
  // A tensor on the device: CUDA would multiply with the reciprocal of a number, and round differently.
  const at::Tensor divisors = at::full({1}, divisor, options);
  const auto reduceBlock = [&](int64_t begin, int64_t end) {
    at::Tensor sums = at::zeros({end - begin}, options);
    for (int64_t copy = 0; copy < copies.size(0); ++copy) decodeAdd(copies[copy], {begin, end}, dtype, sums);
    mean.narrow(0, begin, end - begin).copy_(sums.div_(divisors));
  };
  const int64_t length = piece.end - piece.begin;
  const int64_t groupElements = layout().groupElements;
  const int64_t block =
      mean.is_cpu() ? ceilDivide(kBlock, groupElements) * groupElements : std::max<int64_t>(length, 1);
  shareOut(ceilDivide(length, block), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      reduceBlock(piece.begin + i * block, std::min(piece.begin + (i + 1) * block, piece.end));
    }
  });
  const bool isEmpty = piece.begin == piece.end && mean.numel() > 0;
  if (piece.end == mean.numel() && !isEmpty) start(mean, encoding, packed);
}

void Codec::decodeMeanAndEncode(const at::Tensor& copies, double divisor, const Encoding& encoding, at::Tensor& mean,
                                at::Tensor& packed) const {
  const Piece whole{0, mean.numel()};
  decodeMean(copies, whole, divisor, encoding, mean, packed);
  encode(mean, whole, encoding, packed);
}

void Codec::encodeChunks(const at::Tensor& values, int64_t chunkLength, const Encoding& encoding,
                         at::Tensor& packed) const {
  forChunks(values, chunkLength, packed, [&](int64_t row, int64_t begin, int64_t length) {
    const at::Tensor chunk = values.narrow(0, begin, length);
    const Encoding part = encoding.narrow(begin, length);
    at::Tensor bytes = packed[row];
    start(chunk, part, bytes);
    encode(chunk, {0, length}, part, bytes);
  });
}

void Codec::decodeChunks(const at::Tensor& packed, int64_t chunkLength, at::Tensor& values) const {
  forChunks(values, chunkLength, packed, [&](int64_t row, int64_t begin, int64_t length) {
    at::Tensor chunk = values.narrow(0, begin, length);
    decode(packed[row], {0, length}, chunk);
  });
}

double CodecInfo::bitsPerElement() const {
  const PackedLayout layout = codec->layout();
  return 8.0 * static_cast<double>(layout.groupBytes) / static_cast<double>(layout.groupElements);
}

bool CodecRegistry::add(CodecInfo info) {
  const std::string name = info.name;
  const bool isNew = codecs().emplace(name, std::move(info)).second;
  TORCH_INTERNAL_ASSERT(isNew, "two codecs are registered as '", name, "'");
  return true;
}

const CodecInfo& CodecRegistry::find(const std::string& name) {
  const auto entry = codecs().find(name);
  if (entry != codecs().end()) return entry->second;
  std::string valid;
  for (const auto& known : names()) valid += (valid.empty() ? "" : ", ") + known;
  TORCH_CHECK_VALUE(false, "no codec is named '", name, "'; available: ", valid);
}

std::vector<std::string> CodecRegistry::names() {
  std::vector<std::string> all;
  all.reserve(codecs().size());
  for (const auto& [name, info] : codecs()) all.push_back(name);
  std::sort(all.begin(), all.end(), [](const std::string& one, const std::string& other) {
    return codecs().at(one).position < codecs().at(other).position;
  });
  return all;
}

}  // namespace bagua
