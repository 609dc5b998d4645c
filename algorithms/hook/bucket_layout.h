// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <unordered_map>
#include <vector>

#include "algorithms/bucket.h"
#include "backend/operation/operation.h"

namespace bagua {

// Which gradients travel together and in which order, by the positions of their parameters: what the bits of a codec's
// result depend on.
using BucketLayout = std::vector<std::vector<int64_t>>;

// Recognises the parameters of one model in the buckets that DDP hands over. DDP puts the whole model into one bucket
// (per dtype) in the first step of a process and into others from the second on; a run that continues from a checkpoint
// has to begin with the others, or its bits differ from those of a run that was not interrupted.
class BucketLayouts {
 public:
  // `unusualSteps`: how many steps of a process come before DDP has rebuilt its buckets.
  BucketLayouts(const std::vector<at::Tensor>& parameters, int64_t unusualSteps);

  // Without parameters to recognise, it learns them in the order in which it meets them.
  [[nodiscard]] std::vector<BucketEntry> entriesOf(const c10d::GradBucket& gradients);
  // The parts of `bucket` that the wanted layout has travel apart, or else the whole. Their entries are in that order.
  [[nodiscard]] std::vector<std::vector<BucketEntry>> partsOf(const std::vector<BucketEntry>& bucket) const;

  // What of them ranks compare and see in messages: "5-3|2-0", parts of one bucket apart. Null where no parameter is
  // known.
  std::shared_ptr<const GradientList> gradientsOf(const std::vector<std::vector<BucketEntry>>& parts);

  // Notes what has travelled together; `isFirst` and `isLast` of a step.
  void note(const std::vector<std::vector<BucketEntry>>& parts, bool isFirst, bool isLast);
  // Of the last complete step; the wanted one until DDP has rebuilt its buckets.
  [[nodiscard]] const BucketLayout& last() const { return steps_ <= unusualSteps_ ? wanted_ : last_; }
  // Throws ValueError unless it holds parameters of this model, each once.
  void check(const BucketLayout& layout) const;
  void want(BucketLayout layout) { wanted_ = std::move(layout); }

 private:
  [[nodiscard]] int64_t positionOf(const at::Tensor& parameter);

  std::unordered_map<const c10::TensorImpl*, int64_t> positions_;
  // Those that were learnt, alive: another tensor could take the place of one that is gone.
  std::vector<at::Tensor> learnt_;
  const bool isLearning_;
  const int64_t unusualSteps_;
  BucketLayout wanted_;
  BucketLayout current_;
  BucketLayout last_;
  int64_t steps_ = 0;
  // By their hash: a text is made once for each layout and not for each bucket.
  std::unordered_map<uint64_t, std::shared_ptr<const GradientList>> gradientLists_;
};

// Whether both hold the same parameters in the same order.
bool isSameOrder(const std::vector<BucketEntry>& one, const std::vector<BucketEntry>& other);

// A flat copy of the gradients of `part`, to be written back after it was reduced.
Bucket gatherPart(const std::vector<BucketEntry>& part);
void scatterPart(const Bucket& bucket, const std::vector<BucketEntry>& part);

}  // namespace bagua
