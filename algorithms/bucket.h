// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "algorithms/stage.h"

namespace bagua {

// One gradient of a bucket.
struct BucketEntry {
  // The parameter's position among those that the algorithm was given. Where it was given none: in the order in which
  // DDP first handed the gradients over, which is the same on all ranks, and stays when DDP rebuilds its buckets.
  int64_t parameter = -1;
  // A view of the bucket's flat tensor, laid out as the parameter is.
  at::Tensor gradient;
  // Whether this rank's backwards have used the parameter since its gradient last travelled. See Bucket::tellsUse.
  bool isUsed = true;
};

// The gradients of a bucket, in the order of its flat tensor, which they cover. The views are made when somebody asks:
// each takes some microseconds, and many algorithms never look at one. One thread at a time may ask.
class BucketEntries {
 public:
  using Make = std::function<std::vector<BucketEntry>()>;

  BucketEntries() = default;
  // NOLINTNEXTLINE(google-explicit-constructor): what it is
  BucketEntries(std::vector<BucketEntry> entries) : entries_(std::move(entries)) {}
  BucketEntries(std::initializer_list<BucketEntry> entries) : entries_(entries) {}
  explicit BucketEntries(Make make) : make_(std::move(make)) {}

  [[nodiscard]] const std::vector<BucketEntry>& all() const {
    if (make_) entries_ = std::exchange(make_, nullptr)();
    return entries_;
  }
  [[nodiscard]] auto begin() const { return all().begin(); }
  [[nodiscard]] auto end() const { return all().end(); }
  [[nodiscard]] size_t size() const { return all().size(); }
  [[nodiscard]] const BucketEntry& front() const { return all().front(); }
  const BucketEntry& operator[](size_t place) const { return all()[place]; }
  // NOLINTNEXTLINE(readability-identifier-naming): as a vector names it
  void push_back(BucketEntry entry) {
    static_cast<void>(all());
    entries_.push_back(std::move(entry));
  }

 private:
  mutable Make make_;
  mutable std::vector<BucketEntry> entries_;
};

// The parameters of entries, or of whatever has one each.
template <class Entries>
std::vector<int64_t> positionsOf(const Entries& entries) {
  std::vector<int64_t> positions;
  positions.reserve(entries.size());
  for (const auto& entry : entries) positions.push_back(entry.parameter);
  return positions;
}

// Whether some parameter is in both.
inline bool shareOne(const std::vector<int64_t>& positions, const std::vector<int64_t>& others) {
  return std::any_of(positions.begin(), positions.end(), [&](int64_t position) {
    return std::find(others.begin(), others.end(), position) != others.end();
  });
}

// The gradients that travel together: a flat tensor, reduced in place.
struct Bucket {
  at::Tensor flat;
  // At least one.
  BucketEntries entries = {};
  // Whether there may be parameters that no rank has used: DDP keeps what comes of their gradients from the optimizer.
  bool tellsUse = false;
  // A CUDA graph captures the program, and will repeat it.
  bool isCaptured = false;
  // The flat tensor holds a part for each rank: see ReducesToParts.
  bool isInParts = false;
  // This rank's group has the first shards of the parameters, or all there is of them: it speaks for those with others.
  bool isOfFirstShards = true;
  // Synchronised backwards before this one, in earlier runs too where this one continues a checkpoint.
  int64_t step = 0;
  // The first entry's parameter: to ask the entry for it would make the views.
  int64_t firstParameter = -1;
  // For whatever is drawn at random: of the step and the first parameter, the same on all ranks.
  uint64_t key = 0;
  StageSeconds seconds = {};
  // Tensors that the device may still have to read when reduce() returns, though nobody else holds them any more. They
  // live as long as the program, which is until the stream that submitted it waits for it, or the device is done. Only
  // memory that another stream has taken needs that: what a program takes itself, it may let go of.
  using Retained = std::vector<at::Tensor>;
  std::shared_ptr<Retained> retained = std::make_shared<Retained>();
};

// Bucket::key. `parameter` is that of the first entry.
uint64_t bucketKey(uint64_t seed, int64_t step, int64_t parameter);

}  // namespace bagua
