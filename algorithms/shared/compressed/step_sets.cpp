// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/step_sets.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>

#include "kernels/device_ways.h"

namespace bagua::compressed {

void StepSets::begin(int64_t step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (step == step_) return;
  step_ = step;
  if (hasWritten_ && !isLost_) current_ = 1 - current_;
  hasWritten_ = isLost_ = false;
  lostBefore_ = lostOnDevice_;
  lostOnDevice_.reset();
}

int StepSets::current() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return current_;
}

void StepSets::noteWritten() {
  const std::lock_guard<std::mutex> lock(mutex_);
  hasWritten_ = true;
}

// Minimum and maximum pass a NaN on.
void StepSets::noteResult(const at::Tensor& result) {
  if (result.numel() == 0) return;
  const auto [low, high] = at::aminmax(result);
  noteWhetherFinite(low.isfinite().logical_and_(high.isfinite()));
}

void StepSets::noteWhetherFinite(const at::Tensor& isFinite) {
  if (worksOnCpu(isFinite)) return noteWhetherFinite(isFinite.item<bool>());
  const at::Tensor isLost = isFinite.logical_not();
  const std::lock_guard<std::mutex> lock(mutex_);
  lostOnDevice_ = lostOnDevice_.defined() ? lostOnDevice_.logical_or(isLost) : isLost;
}

void StepSets::noteWhetherFinite(bool isFinite) {
  if (isFinite) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  isLost_ = true;
}

void StepSets::agree(at::Device device, Communicator& communicator) {
  at::Tensor isLost;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    isLost = lostOnDevice_.defined() ? lostOnDevice_.to(at::kFloat) : at::full({1}, isLost_ ? 1.0F : 0.0F, device);
  }
  communicator.allReduce(isLost, c10d::ReduceOp::MAX);
  noteWhetherFinite(isLost.eq(0).all());
}

void StepSets::restoreIfLost(const at::Tensor& current, const at::Tensor& before) const {
  const at::Tensor isLost = wasLost();
  if (!isLost.defined()) return;
  at::Tensor restored = current;
  at::where_out(restored, isLost, before, current);
}

at::Tensor StepSets::wasLost() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return lostBefore_;
}

int StepSets::betweenSteps() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool isLost = isLost_ || (lostOnDevice_.defined() && lostOnDevice_.item<bool>());
  return hasWritten_ && !isLost ? 1 - current_ : current_;
}

void StepSets::reset() {
  const std::lock_guard<std::mutex> lock(mutex_);
  current_ = 0;
  step_ = -1;
  hasWritten_ = isLost_ = false;
  lostOnDevice_.reset();
  lostBefore_.reset();
}

}  // namespace bagua::compressed
