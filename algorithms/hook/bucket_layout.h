// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/DimVector.h>

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

// The place of a gradient in a bucket. A view of it is made only for those who look at it, see BucketEntries.
struct GradientSlot {
  int64_t parameter = -1;
  // Where the caller has made the view already.
  at::Tensor gradient = {};
  // Else where it begins in the flat tensor, and how it is laid out there: as the parameter, which is not kept itself,
  // because the thread of a program must not be the last to hold a tensor that Python knows. No strides: row-major.
  int64_t begin = 0;
  c10::DimVector sizes = {};
  c10::DimVector strides = {};
  // See BucketEntry.
  bool isUsed = true;
};
using Slots = std::vector<GradientSlot>;

// The gradients in these places of a flat tensor.
std::vector<BucketEntry> entriesOf(const at::Tensor& flat, const Slots& slots);

// Recognises the parameters of one model in the buckets that DDP hands over. DDP puts the whole model into one bucket
// (per dtype) in the first step of a process and into others from the second on; a run that continues from a checkpoint
// has to begin with the others, or its bits differ from those of a run that was not interrupted.
class BucketLayouts {
 public:
  // `unusualSteps`: how many steps of a process come before DDP has rebuilt its buckets.
  BucketLayouts(const std::vector<at::Tensor>& parameters, int64_t unusualSteps);

  // Without parameters to recognise, it learns them in the order in which it meets them.
  // Sparse gradients have no slots.
  [[nodiscard]] Slots slotsOf(const c10d::GradBucket& gradients);
  // The parts of `bucket` that the wanted layout has travel apart, or else the whole. Their slots are in that order.
  [[nodiscard]] std::vector<Slots> partsOf(const Slots& bucket) const;

  // What of them ranks compare and see in messages: "5-3|2-0", parts of one bucket apart. Null where no parameter is
  // known.
  std::shared_ptr<const GradientList> gradientsOf(const std::vector<Slots>& parts);

  // Notes what has travelled together, of a bucket as DDP has it; `isFirst` of a step.
  void note(const Slots& bucket, const std::vector<Slots>& parts, bool isFirst);
  // After the last bucket of a step. Once DDP itself hands over the wanted layout, and has its final buckets, it is
  // wanted no more: nothing is left to compare bucket by bucket.
  void noteEnd();
  // Of the last complete step; the wanted one until DDP has rebuilt its buckets.
  [[nodiscard]] const BucketLayout& last() const { return steps_ <= unusualSteps_ ? wanted_ : last_; }
  // Throws ValueError unless it holds parameters of this model, each once.
  void check(const BucketLayout& layout) const;
  void want(BucketLayout layout) { wanted_ = std::move(layout); }
  [[nodiscard]] bool wantsAny() const { return !wanted_.empty(); }

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
  // Whether no bucket of the step at hand was cut or put into another order.
  bool isWhole_ = true;
  // By their hash: a text is made once for each layout and not for each bucket.
  std::unordered_map<uint64_t, std::shared_ptr<const GradientList>> gradientLists_;
};

// Whether both hold the same parameters in the same order.
bool isSameOrder(const Slots& one, const Slots& other);

// A flat copy of the gradients of `part`, to be written back after it was reduced.
Bucket gatherPart(const std::vector<BucketEntry>& part);
void scatterPart(const Bucket& bucket, const std::vector<BucketEntry>& part);

}  // namespace bagua
