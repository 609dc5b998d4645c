// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>

#include "backend/communicator.h"

namespace bagua::compressed {

// Which of two sets of state a step reads; it writes the other. The next step goes on from what was written, unless
// some result of the step was not finite: GradScaler then skips the optimizer's step on every rank, so what was sent
// was lost and the old set holds. Results are the same bits on all ranks, and so is that decision. Any thread may call.
class StepSets {
 public:
  // Before all else of a bucket: the first of a step decides about the step before.
  void begin(int64_t step);
  // The set that the step at hand reads.
  [[nodiscard]] int current() const;
  [[nodiscard]] int next() const { return 1 - current(); }
  // The step at hand has written its set.
  void noteWritten();
  // What of the step reaches the optimizer, which is read once more, or whether it is finite: one bool, where that is
  // known.
  void noteResult(const at::Tensor& result);
  void noteWhetherFinite(const at::Tensor& isFinite);
  void noteWhetherFinite(bool isFinite);

  // Ranks that see different results agree: the step at hand is lost on all of them if it is on one. Collective.
  void agree(at::Device device, Communicator& communicator);

  // On CUDA the CPU does not wait for results, and takes every step for one that counts. There the device tells
  // whether the step before was lost, one bool, which is undefined on the CPU and where there was none: what a step
  // reads has to be replaced first by what the other set holds. There are two ways. Codecs do so while they code, see
  // Encoding::wasLost, because a pass of its own would read and write both sets in every step, some 20 bytes for each
  // parameter, for the sake of one step in thousands.
  [[nodiscard]] at::Tensor wasLost() const;
  // And this is that pass, for what no codec is about to read: it is small (numbers of 8 bits, factors), or rare
  // (buckets were rebuilt), or multiplied next (powersgd's residuals).
  void restoreIfLost(const at::Tensor& current, const at::Tensor& before) const;

  // The set to go on from, between two steps.
  [[nodiscard]] int betweenSteps() const;
  // The first set is read next.
  void reset();

 private:
  mutable std::mutex mutex_;
  int current_ = 0;
  int64_t step_ = -1;
  // Whether the step at hand has written its set, and whether one of its results was not finite.
  bool hasWritten_ = false;
  bool isLost_ = false;
  // On CUDA instead: a flag of the step at hand, and of the one before.
  at::Tensor lostOnDevice_;
  at::Tensor lostBefore_;
};

}  // namespace bagua::compressed
