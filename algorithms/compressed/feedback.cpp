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

namespace {

void addOrphans(const at::Tensor& residual, const std::vector<ParameterState::Orphan>& orphans, double factor) {
  for (const auto& orphan : orphans) {
    residual.narrow(0, orphan.begin, orphan.values.numel()).add_(orphan.values, factor);
  }
}

}  // namespace

template <typename State>
Feedback::Sets<State>& Feedback::setsOf(SetsByCodec<State>& sets, const std::string& codec) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& ofCodec = sets[codec];
  if (!ofCodec) ofCodec = std::make_unique<Sets<State>>(codec);
  return *ofCodec;
}

void Feedback::restoreIfLost(const at::Tensor& current, const at::Tensor& before) const {
  if (lostBefore_.defined()) current.copy_(at::where(lostBefore_, before, current));
}

// Threads of a step change neither set, only what they hold.
void Feedback::useFor(const Bucket& bucket, const std::string& codec, const MeanOptions& options,
                      const Communicator& communicator, Coding& coding) {
  const CodedLanes coded(options, bucket.flat.numel(), communicator);
  const auto pieces = ownPieces(coded.lanes, communicator.rank());
  // Where buckets were rebuilt this rank owns other elements: what it still owes of the mean, it sends as its share.
  const bool dividesLater = options.average && coded.lanes.count() == 1;
  const double orphansFactor = dividesLater ? communicator.size() : 1;
  if (isSmall_) {
    useSmall(setsOf(small_, codec), bucket, pieces, orphansFactor, coding);
  } else {
    useWhole(setsOf(whole_, codec), bucket, pieces, orphansFactor, coding);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  hasWritten_ = true;
}

void Feedback::useWhole(Sets<ParameterState>& sets, const Bucket& bucket, const std::vector<Piece>& pieces,
                        double orphansFactor, Coding& coding) {
  ParameterState& owner = sets.owner[current_];
  ParameterState& nextOwner = sets.owner[1 - current_];
  coding.sender.residual = sets.sender[current_].flatFor(bucket);
  coding.sender.nextResidual = sets.sender[1 - current_].flatFor(bucket);
  coding.owner.residual = owner.flatFor(bucket, pieces);
  coding.owner.nextResidual = nextOwner.flatFor(bucket, pieces);
  restoreIfLost(coding.sender.residual, coding.sender.nextResidual);
  restoreIfLost(coding.owner.residual, coding.owner.nextResidual);
  // They will be written anew.
  nextOwner.takeOrphans(bucket);
  addOrphans(coding.sender.residual, owner.takeOrphans(bucket), orphansFactor);
}

// What is changed here is kept at once: if this step is lost, the next one begins with it.
void Feedback::useSmall(Sets<SmallResiduals>& sets, const Bucket& bucket, const std::vector<Piece>& pieces,
                        double orphansFactor, Coding& coding) {
  const std::vector<Piece> all = {{0, bucket.flat.numel()}};
  std::vector<ParameterState::Orphan> orphans;
  const auto begin = [&](SmallResiduals(&state)[2], const std::vector<Piece>& elements) {
    at::Tensor values = state[current_].read(bucket, elements, orphans);
    if (!lostBefore_.defined()) return values;
    std::vector<ParameterState::Orphan> ofBefore;
    restoreIfLost(values, state[1 - current_].read(bucket, elements, ofBefore));
    state[current_].write(bucket, elements, values);
    return values;
  };
  coding.owner.residual = coding.owner.nextResidual = begin(sets.owner, pieces);
  at::Tensor ofSender = begin(sets.sender, all);
  if (!orphans.empty()) {
    addOrphans(ofSender, orphans, orphansFactor);
    sets.sender[current_].write(bucket, all, ofSender);
    orphans.clear();
    ofSender = sets.sender[current_].read(bucket, all, orphans);
  }
  // The step writes to where it reads.
  coding.sender.residual = coding.sender.nextResidual = ofSender;
}

void Feedback::keep(const Bucket& bucket, const std::string& codec, const MeanOptions& options,
                    const Communicator& communicator, const Coding& coding) {
  if (!isSmall_) return;
  Sets<SmallResiduals>& sets = setsOf(small_, codec);
  const CodedLanes coded(options, bucket.flat.numel(), communicator);
  const auto follow = [&](SmallResiduals(&state)[2], const std::vector<Piece>& elements, const at::Tensor& left) {
    state[1 - current_].writeBlend(bucket, elements, state[current_], 1 - kGain, left, kGain);
  };
  follow(sets.sender, {{0, bucket.flat.numel()}}, coding.sender.nextResidual);
  follow(sets.owner, ownPieces(coded.lanes, communicator.rank()), coding.owner.nextResidual);
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
  return withSets([](const auto& byCodec) {
    int64_t bytes = 0;
    for (const auto& [codec, sets] : byCodec) {
      for (const auto& states : {&sets->sender, &sets->owner}) {
        for (const auto& state : *states) bytes += state.bytes();
      }
    }
    return bytes;
  });
}

AlgorithmState Feedback::state() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return withSets([current = currentBetweenSteps()](const auto& byCodec) {
    AlgorithmState all;
    for (const auto& [codec, sets] : byCodec) {
      all.merge(sets->sender[current].state());
      all.merge(sets->owner[current].state());
    }
    return all;
  });
}

namespace {

template <typename Sets>
std::map<std::string, std::unique_ptr<Sets>> loadedSets(const AlgorithmState& state,
                                                        const std::vector<at::Tensor>& parameters) {
  std::map<std::string, std::unique_ptr<Sets>> loaded;
  for (const auto& codec : CodecRegistry::names()) {
    auto sets = std::make_unique<Sets>(codec);
    sets->sender[0].load(state, parameters);
    sets->owner[0].load(state, parameters);
    loaded.emplace(codec, std::move(sets));
  }
  return loaded;
}

// What no state takes would be lost without a word.
void checkThatAllAreTaken(const AlgorithmState& state) {
  for (const auto& [entry, values] : state) {
    bool isTaken = false;
    for (const auto& codec : CodecRegistry::names()) {
      for (const char* const role : {"sender.", "owner."}) {
        isTaken = isTaken || ParameterState(role + codec).takes(entry, state);
      }
    }
    TORCH_CHECK_VALUE(isTaken, "bagua: '", entry, "' of the checkpoint is no state of this algorithm");
  }
}

}  // namespace

void Feedback::load(const AlgorithmState& state, const std::vector<at::Tensor>& parameters) {
  checkThatAllAreTaken(state);
  SetsByCodec<ParameterState> whole;
  SetsByCodec<SmallResiduals> small;
  if (isSmall_) {
    small = loadedSets<Sets<SmallResiduals>>(state, parameters);
  } else {
    whole = loadedSets<Sets<ParameterState>>(state, parameters);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  whole_ = std::move(whole);
  small_ = std::move(small);
  current_ = 0;
  step_ = -1;
  hasWritten_ = isLost_ = false;
  lostOnDevice_.reset();
  lostBefore_.reset();
}

}  // namespace bagua::compressed
