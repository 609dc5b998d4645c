// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/unused.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "kernels/codecs/raw/raw_codec.h"
#include "kernels/device_ways.h"

namespace bagua::compressed {

at::Tensor usedByThisRank(const Bucket& bucket, at::ScalarType dtype) {
  const auto count = static_cast<int64_t>(bucket.entries.size());
  // Filled where it is: a copy of what the host has would wait for the device, and a graph could not hold it.
  at::Tensor used = at::ones({count}, bucket.flat.options().dtype(dtype));
  const auto isUsedAt = [&](int64_t place) { return bucket.entries[place].isUsed; };
  for (int64_t begin = 0, end = 0; begin < count; begin = end) {
    end = begin + 1;
    while (end < count && isUsedAt(end) == isUsedAt(begin)) ++end;
    if (!isUsedAt(begin)) used.narrow(0, begin, end - begin).zero_();
  }
  return used;
}

Sum sumOfUses(const Bucket& bucket) {
  const at::ScalarType dtype = bucket.flat.scalar_type();
  return {usedByThisRank(bucket, dtype), {.codec = rawCodec(dtype)}};
}

void replaceUnlessUsed(const at::Tensor& values, const at::Tensor& isUsed, const at::Tensor& others) {
  if (!worksOnCpu(isUsed)) {
    values.copy_(at::where(isUsed == 0, others, values));
  } else if (isUsed.item<double>() == 0) {
    values.copy_(others);
  }
}

void clearUnused(const Bucket& bucket, const at::Tensor& areUsed) {
  for (size_t i = 0; i < bucket.entries.size(); ++i) {
    const at::Tensor& gradient = bucket.entries[i].gradient;
    replaceUnlessUsed(gradient, areUsed.select(0, static_cast<int64_t>(i)), at::zeros({}, gradient.options()));
  }
}

std::vector<Piece> overlapsWithin(const std::vector<Piece>& pieces, const Piece& elements) {
  std::vector<Piece> overlaps;
  int64_t before = 0;
  for (const auto& piece : pieces) {
    const int64_t begin = std::max(elements.begin, piece.begin);
    const int64_t end = std::min(elements.end, piece.end);
    if (begin < end) overlaps.push_back({before + begin - piece.begin, before + end - piece.begin});
    before += piece.end - piece.begin;
  }
  return overlaps;
}

}  // namespace bagua::compressed
