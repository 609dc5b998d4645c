// SPDX-License-Identifier: Apache-2.0
#include "kernels/codec.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

#include "kernels/device_ways.h"
#include "kernels/integers.h"
#include "kernels/share_out.h"

namespace bagua {
namespace {

// Elements of a block of a mean: its sums stay in a cache. Rounded up to whole groups.
constexpr int64_t kBlock = 16384;

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
  part.key = keyOfPart(key, begin);
  if (hasFeedback()) {
    part.residual = residual.narrow(0, begin, length);
    part.nextResidual = nextResidual.narrow(0, begin, length);
  }
  return part;
}

void Encoding::restoreIfLost(const Piece& piece) const {
  if (!hasFeedback() || !wasLost.defined() || !*wasLost.const_data_ptr<bool>()) return;
  const int64_t length = piece.end - piece.begin;
  residual.narrow(0, piece.begin, length).copy_(nextResidual.narrow(0, piece.begin, length));
}

void Codec::decodeAdd(const at::Tensor& packed, const Piece& piece, at::ScalarType dtype, at::Tensor& sums) const {
  at::Tensor values = at::empty({piece.end}, sums.options().dtype(dtype));
  decode(packed, piece, values);
  sums.add_(values.narrow(0, piece.begin, piece.end - piece.begin));
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
      worksOnCpu(mean) ? ceilDivide(kBlock, groupElements) * groupElements : std::max<int64_t>(length, 1);
  shareOut(ceilDivide(length, block), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      reduceBlock(piece.begin + i * block, std::min(piece.begin + (i + 1) * block, piece.end));
    }
  });
  startIfComplete(mean, piece, encoding, packed);
}

void Codec::startIfComplete(const at::Tensor& mean, const Piece& piece, const Encoding& encoding,
                            at::Tensor& packed) const {
  const bool changesNothing = piece.begin == piece.end && mean.numel() > 0;
  if (piece.end == mean.numel() && !changesNothing) start(mean, encoding, packed);
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

bool CodecInfo::takes(at::DeviceType device) const { return std::ranges::find(devices, device) != devices.end(); }

void CodecInfo::checkDevice(at::Device device, const std::string& where) const {
  TORCH_CHECK_NOT_IMPLEMENTED(takes(device.type()), where, ": codec '", name, "' works on tensors of ",
                              c10::Join(", ", devices), ", got ", device);
}

template <>
std::map<std::string, CodecInfo>& CodecRegistry::entries() {
  static std::map<std::string, CodecInfo> all;
  return all;
}

}  // namespace bagua
