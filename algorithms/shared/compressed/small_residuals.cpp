// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/small_residuals.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace bagua::compressed {
namespace {

// A tensor of that many elements which takes no memory, and is only asked for its size.
at::Tensor placeholder(int64_t numel, const at::Tensor& like) { return at::empty({1}, like.options()).expand({numel}); }

}  // namespace

bool SmallResiduals::Kept::isOf(const std::vector<int64_t>& otherPositions,
                                const std::vector<Piece>& otherPieces) const {
  return positions == otherPositions && pieces == otherPieces;
}

void SmallResiduals::Kept::copyTo(ParameterState& state) const {
  const at::Tensor values = numbers.decoded();
  Bucket bucket;
  int64_t numel = 0;
  for (size_t i = 0; i < positions.size(); ++i) {
    bucket.entries.push_back({.parameter = positions[i], .gradient = placeholder(lengths[i], values)});
    numel += lengths[i];
  }
  bucket.flat = placeholder(numel, values);
  state.flatFor(bucket, pieces).copy_(values);
}

void SmallResiduals::arrange(const Bucket& bucket, const std::vector<Piece>& pieces,
                             std::vector<ParameterState::Orphan>& orphans) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto positions = positionsOf(bucket.entries);
  for (const auto& kept : kept_) {
    if (kept.isOf(positions, pieces)) return;
  }
  std::erase_if(kept_, [&](const Kept& kept) {
    const bool isOutdated = shareOne(kept.positions, positions);
    if (isOutdated) kept.copyTo(moved_);
    return isOutdated;
  });
  SmallNumbers numbers = SmallNumbers::encoded(moved_.flatFor(bucket, pieces));
  for (auto& orphan : moved_.takeOrphans(bucket)) orphans.push_back(std::move(orphan));
  replace(bucket, pieces, std::move(numbers));
}

at::Tensor SmallResiduals::read(const Bucket& bucket, const std::vector<Piece>& pieces) const {
  return numbersOf(bucket, pieces).decoded();
}

void SmallResiduals::write(const Bucket& bucket, const std::vector<Piece>& pieces, const at::Tensor& values) {
  SmallNumbers numbers = SmallNumbers::encoded(values);
  const std::lock_guard<std::mutex> lock(mutex_);
  replace(bucket, pieces, std::move(numbers));
}

void SmallResiduals::writeBlend(const Bucket& bucket, const std::vector<Piece>& pieces, const SmallResiduals& other,
                                float keep, const at::Tensor& left, float gain) {
  SmallNumbers numbers = SmallNumbers::blended(other.numbersOf(bucket, pieces), keep, left, gain);
  const std::lock_guard<std::mutex> lock(mutex_);
  replace(bucket, pieces, std::move(numbers));
}

SmallNumbers SmallResiduals::numbersOf(const Bucket& bucket, const std::vector<Piece>& pieces) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto positions = positionsOf(bucket.entries);
  const auto found =
      std::find_if(kept_.begin(), kept_.end(), [&](const Kept& kept) { return kept.isOf(positions, pieces); });
  TORCH_INTERNAL_ASSERT(found != kept_.end());
  return found->numbers;
}

void SmallResiduals::replace(const Bucket& bucket, const std::vector<Piece>& pieces, SmallNumbers numbers) {
  Kept kept;
  kept.positions = positionsOf(bucket.entries);
  for (const auto& entry : bucket.entries) kept.lengths.push_back(entry.gradient.numel());
  kept.pieces = pieces;
  kept.numbers = std::move(numbers);
  std::erase_if(kept_, [&](const Kept& other) { return shareOne(other.positions, kept.positions); });
  moved_.forget(kept.positions, *bucket.retained);
  kept_.push_back(std::move(kept));
}

void SmallResiduals::forget(const std::vector<int64_t>& positions, Bucket::Retained& retained) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& kept : kept_) {
    if (shareOne(kept.positions, positions)) kept.copyTo(moved_);
  }
  std::erase_if(kept_, [&](const Kept& kept) { return shareOne(kept.positions, positions); });
  moved_.forget(positions, retained);
}

void SmallResiduals::rescale(double factor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& kept : kept_) kept.numbers = SmallNumbers::encoded(kept.numbers.decoded().mul_(factor));
  moved_.rescale(factor);
}

int64_t SmallResiduals::bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t bytes = moved_.bytes();
  for (const auto& kept : kept_) bytes += kept.numbers.bytes();
  return bytes;
}

AlgorithmState SmallResiduals::state() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  AlgorithmState all = moved_.state();
  for (const auto& kept : kept_) {
    ParameterState decoded(moved_.name());
    kept.copyTo(decoded);
    all.merge(decoded.state());
  }
  return all;
}

void SmallResiduals::load(const AlgorithmState& state, const std::vector<at::Tensor>& parameters) {
  const std::lock_guard<std::mutex> lock(mutex_);
  moved_.load(state, parameters);
  kept_.clear();
}

}  // namespace bagua::compressed
