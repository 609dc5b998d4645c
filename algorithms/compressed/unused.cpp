// SPDX-License-Identifier: Apache-2.0
#include "algorithms/compressed/unused.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "algorithms/compressed/raw_codec.h"
#include "kernels/device_ways.h"

namespace bagua::compressed {

at::Tensor usedByThisRank(const Bucket& bucket, at::ScalarType dtype) {
  at::Tensor used = at::empty({static_cast<int64_t>(bucket.entries.size())}, at::kFloat);
  auto* number = used.mutable_data_ptr<float>();
  for (const auto& entry : bucket.entries) *number++ = entry.isUsed ? 1 : 0;
  return used.to(bucket.flat.options().dtype(dtype));
}

Sum sumOfUses(const Bucket& bucket) {
  const at::ScalarType dtype = bucket.flat.scalar_type();
  return {usedByThisRank(bucket, dtype), {.codec = rawCodec(dtype)}};
}

void replaceUnlessUsed(const at::Tensor& values, const at::Tensor& isUsed, const at::Tensor& others) {
  if (!worksOnHost(isUsed)) {
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
