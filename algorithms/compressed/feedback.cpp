// SPDX-License-Identifier: Apache-2.0
#include "algorithms/compressed/feedback.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/where.h>

#include <cmath>

#include "algorithms/compressed/collectives.h"

namespace bagua::compressed {
namespace {

// Minimum and maximum pass a NaN on.
bool isFinite(const at::Tensor& values) {
  const auto [low, high] = at::aminmax(values);
  return std::isfinite(low.item<double>()) && std::isfinite(high.item<double>());
}

}  // namespace

void Feedback::beginBucket(int64_t step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (step == step_) return;
  step_ = step;
  if (hasWritten_ && !isLost_) current_ = 1 - current_;
  hasWritten_ = isLost_ = false;
  lostBefore_ = lostOnDevice_;
  lostOnDevice_.reset();
}

Feedback::Residuals& Feedback::residualsOf(const std::string& codec) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& residuals = residuals_[codec];
  if (!residuals) residuals = std::make_unique<Residuals>(codec);
  return *residuals;
}

void Feedback::restoreIfLost(const at::Tensor& current, const at::Tensor& before) const {
  if (lostBefore_.defined()) current.copy_(at::where(lostBefore_, before, current));
}

// Threads of a step change neither set, only what they hold.
void Feedback::useFor(const Bucket& bucket, const std::string& codec, const MeanOptions& options,
                      const Communicator& communicator, Coding& coding) {
  Residuals& residuals = residualsOf(codec);
  const CodedLanes coded(options, bucket.flat.numel(), communicator);
  const HostLanes& lanes = coded.lanes;
  const auto pieces = ownPieces(lanes, communicator.rank());
  ParameterState& sender = residuals.sender[current_];
  ParameterState& owner = residuals.owner[current_];
  ParameterState& nextSender = residuals.sender[1 - current_];
  ParameterState& nextOwner = residuals.owner[1 - current_];
  coding.sender.residual = sender.flatFor(bucket);
  coding.sender.nextResidual = nextSender.flatFor(bucket);
  coding.owner.residual = owner.flatFor(bucket, pieces);
  coding.owner.nextResidual = nextOwner.flatFor(bucket, pieces);
  restoreIfLost(coding.sender.residual, coding.sender.nextResidual);
  restoreIfLost(coding.owner.residual, coding.owner.nextResidual);
  // They will be written anew.
  nextOwner.takeOrphans(bucket);
  // Where buckets were rebuilt this rank owns other elements: what it still owes of the mean, it sends as its share.
  const bool dividesLater = options.average && lanes.count() == 1;
  const double factor = dividesLater ? communicator.size() : 1;
  for (const auto& orphan : owner.takeOrphans(bucket)) {
    coding.sender.residual.narrow(0, orphan.begin, orphan.values.numel()).add_(orphan.values, factor);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  hasWritten_ = true;
}

void Feedback::endBucket(const at::Tensor& result) {
  if (result.numel() == 0) return;
  if (result.is_cpu()) {
    if (isFinite(result)) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    isLost_ = true;
    return;
  }
  const auto [low, high] = at::aminmax(result);
  const at::Tensor isLost = low.isfinite().logical_and_(high.isfinite()).logical_not_();
  const std::lock_guard<std::mutex> lock(mutex_);
  lostOnDevice_ = lostOnDevice_.defined() ? lostOnDevice_.logical_or(isLost) : isLost;
}

int Feedback::currentBetweenSteps() const {
  const bool isLost = isLost_ || (lostOnDevice_.defined() && lostOnDevice_.item<bool>());
  return hasWritten_ && !isLost ? 1 - current_ : current_;
}

int64_t Feedback::bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t bytes = 0;
  for (const auto& [codec, residuals] : residuals_) {
    for (const auto& states : {&residuals->sender, &residuals->owner}) {
      for (const ParameterState& state : *states) bytes += state.bytes();
    }
  }
  return bytes;
}

AlgorithmState Feedback::state() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int current = currentBetweenSteps();
  AlgorithmState all;
  for (const auto& [codec, residuals] : residuals_) {
    all.merge(residuals->sender[current].state());
    all.merge(residuals->owner[current].state());
  }
  return all;
}

void Feedback::load(const AlgorithmState& state, const std::vector<at::Tensor>& parameters) {
  std::map<std::string, std::unique_ptr<Residuals>> loaded;
  for (const auto& codec : CodecRegistry::names()) {
    auto residuals = std::make_unique<Residuals>(codec);
    residuals->sender[0].load(state, parameters);
    residuals->owner[0].load(state, parameters);
    loaded.emplace(codec, std::move(residuals));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  residuals_ = std::move(loaded);
  current_ = 0;
  step_ = -1;
  hasWritten_ = isLost_ = false;
  lostOnDevice_.reset();
  lostBefore_.reset();
}

}  // namespace bagua::compressed
