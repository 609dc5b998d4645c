// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/feedback.h"

#include "algorithms/shared/compressed/collectives.h"
#include "algorithms/shared/compressed/unused.h"

namespace bagua::compressed {
namespace {

using Orphans = std::vector<ParameterState::Orphan>;

// Adds what the owners of chunks no longer own. `current` counts, unless the step before `wasLost`: then `before` does.
void addOrphans(const at::Tensor& residual, const Orphans& current, const Orphans& before, const at::Tensor& wasLost,
                double factor) {
  const auto add = [&](const Orphans& orphans, const at::Tensor& isNothing) {
    for (const auto& [begin, values] : orphans) {
      const at::Tensor counted = isNothing.defined() ? values.masked_fill(isNothing, 0) : values;
      keepFinite(residual.narrow(0, begin, values.numel()).add_(counted, factor));
    }
  };
  add(current, wasLost);
  if (wasLost.defined()) add(before, wasLost.logical_not());
}

// Returns what this rank codes as the owner, and keeps residuals of.
std::vector<Piece> codedByOwner(const Bucket& bucket, const MeanOptions& options, const Communicator& communicator) {
  if (options.isToParts) return {};
  const CodedLanes coded(options, bucket.flat.numel(), communicator);
  return ownPieces(coded.lanes, communicator.rank());
}

}  // namespace

template <typename State>
Feedback::Sets<State>& Feedback::setsOf(SetsByCodec<State>& sets, const std::string& codec) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& ofCodec = sets[codec];
  if (!ofCodec) ofCodec = std::make_unique<Sets<State>>(codec);
  return *ofCodec;
}

// Threads of a step change neither set, only what they hold.
void Feedback::useFor(const Bucket& bucket, const std::string& codec, const MeanOptions& options,
                      const Communicator& communicator, Coding& coding) {
  const CodedLanes coded(options, bucket.flat.numel(), communicator);
  const auto pieces = codedByOwner(bucket, options, communicator);
  // Where buckets were rebuilt this rank owns other elements: what it still owes of the mean, it sends as its share.
  const bool dividesLater = options.average && coded.lanes.count() == 1;
  const double orphansFactor = dividesLater ? communicator.size() : 1;
  if (isSmall_) {
    useSmall(setsOf(small_, codec), bucket, pieces, orphansFactor, coding);
  } else {
    useWhole(setsOf(whole_, codec), bucket, pieces, orphansFactor, coding);
  }
  steps_.noteWritten();
}

void Feedback::useWhole(Sets<ParameterState>& sets, const Bucket& bucket, const std::vector<Piece>& pieces,
                        double orphansFactor, Coding& coding) {
  const int current = steps_.current();
  ParameterState& owner = sets.owner[current];
  ParameterState& nextOwner = sets.owner[1 - current];
  coding.sender.residual = sets.sender[current].flatFor(bucket);
  coding.sender.nextResidual = sets.sender[1 - current].flatFor(bucket);
  coding.sender.wasLost = steps_.wasLost();
  if (pieces.empty()) return;
  coding.owner.residual = owner.flatFor(bucket, pieces);
  coding.owner.nextResidual = nextOwner.flatFor(bucket, pieces);
  coding.owner.wasLost = coding.sender.wasLost;
  // The next ones will be written anew.
  const Orphans orphans = owner.takeOrphans(bucket);
  const Orphans orphansBefore = nextOwner.takeOrphans(bucket);
  if (orphans.empty() && orphansBefore.empty()) return;
  steps_.restoreIfLost(coding.sender.residual, coding.sender.nextResidual);
  addOrphans(coding.sender.residual, orphans, orphansBefore, coding.sender.wasLost, orphansFactor);
  coding.sender.wasLost.reset();
}

// What is changed here is kept at once: if this step is lost, the next one begins with it.
void Feedback::useSmall(Sets<SmallResiduals>& sets, const Bucket& bucket, const std::vector<Piece>& pieces,
                        double orphansFactor, Coding& coding) {
  const std::vector<Piece> all = {{0, bucket.flat.numel()}};
  const int current = steps_.current();
  const at::Tensor wasLost = steps_.wasLost();
  Orphans orphans;
  Orphans orphansBefore;
  const auto begin = [&](SmallResiduals(&state)[2], const std::vector<Piece>& elements) {
    SmallResiduals& residuals = state[current];
    residuals.arrange(bucket, elements, orphans);
    if (wasLost.defined()) {
      state[1 - current].arrange(bucket, elements, orphansBefore);
      const SmallNumbers numbers = residuals.numbersOf(bucket, elements);
      const SmallNumbers before = state[1 - current].numbersOf(bucket, elements);
      steps_.restoreIfLost(numbers.codes, before.codes);
      steps_.restoreIfLost(numbers.exponents, before.exponents);
    }
    return residuals.read(bucket, elements);
  };
  if (!pieces.empty()) coding.owner.residual = begin(sets.owner, pieces);
  at::Tensor ofSender = begin(sets.sender, all);
  if (!orphans.empty() || !orphansBefore.empty()) {
    addOrphans(ofSender, orphans, orphansBefore, wasLost, orphansFactor);
    sets.sender[current].write(bucket, all, ofSender);
    ofSender = sets.sender[current].read(bucket, all);
  }
  coding.sender.residual = ofSender;
  // The step writes to where it reads, unless that may be needed again.
  coding.sender.nextResidual = bucket.tellsUse ? ofSender.clone() : ofSender;
  if (pieces.empty()) return;
  coding.owner.nextResidual = bucket.tellsUse ? coding.owner.residual.clone() : coding.owner.residual;
}

void Feedback::keep(const Bucket& bucket, const std::string& codec, const MeanOptions& options,
                    const Communicator& communicator, const Coding& coding) {
  if (!isSmall_) return;
  Sets<SmallResiduals>& sets = setsOf(small_, codec);
  const auto pieces = codedByOwner(bucket, options, communicator);
  const int current = steps_.current();
  const auto follow = [&](SmallResiduals(&state)[2], const std::vector<Piece>& elements, const at::Tensor& left) {
    state[1 - current].writeBlend(bucket, elements, state[current], 1 - kGain, left, kGain);
  };
  follow(sets.sender, {{0, bucket.flat.numel()}}, coding.sender.nextResidual);
  if (!pieces.empty()) follow(sets.owner, pieces, coding.owner.nextResidual);
}

void Feedback::passOver(const Bucket& bucket, const std::string& codec, const MeanOptions& options,
                        const Communicator& communicator) {
  Coding coding;
  useFor(bucket, codec, options, communicator, coding);
  for (Encoding* const encoding : {&coding.sender, &coding.owner}) {
    if (!encoding->hasFeedback()) continue;
    if (encoding->wasLost.defined()) steps_.restoreIfLost(encoding->residual, encoding->nextResidual);
    encoding->nextResidual.copy_(encoding->residual);
  }
  keep(bucket, codec, options, communicator, coding);
}

void Feedback::keepUnused(const Bucket& bucket, const at::Tensor& areUsed, const MeanOptions& options,
                          const Communicator& communicator, const Coding& coding) const {
  const CodedLanes coded(options, bucket.flat.numel(), communicator);
  const auto owned = ownPieces(coded.lanes, communicator.rank());
  const auto keep = [](const at::Tensor& isUsed, const Encoding& encoding, const Piece& piece) {
    const int64_t length = piece.end - piece.begin;
    replaceUnlessUsed(encoding.nextResidual.narrow(0, piece.begin, length), isUsed,
                      encoding.residual.narrow(0, piece.begin, length));
  };
  int64_t begin = 0;
  for (size_t i = 0; i < bucket.entries.size(); ++i) {
    const Piece entry{begin, begin + bucket.entries[i].gradient.numel()};
    begin = entry.end;
    const at::Tensor isUsed = areUsed.select(0, static_cast<int64_t>(i));
    keep(isUsed, coding.sender, entry);
    for (const auto& piece : overlapsWithin(owned, entry)) keep(isUsed, coding.owner, piece);
  }
}

void Feedback::forget(const std::vector<int64_t>& parameters, Bucket::Retained& retained) {
  if (parameters.empty()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  withSets([&](const auto& byCodec) {
    for (const auto& [codec, sets] : byCodec) {
      for (auto* states : {&sets->sender, &sets->owner}) {
        for (auto& state : *states) state.forget(parameters, retained);
      }
    }
  });
}

void Feedback::rescale(double factor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  withSets([factor](const auto& byCodec) {
    for (const auto& [codec, sets] : byCodec) {
      for (auto* states : {&sets->sender, &sets->owner}) {
        for (auto& state : *states) state.rescale(factor);
      }
    }
  });
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
  return withSets([current = steps_.betweenSteps()](const auto& byCodec) {
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

bool isOfAnyCodec(const std::string& name, const AlgorithmState& state) {
  for (const auto& codec : CodecRegistry::names()) {
    for (const char* const role : {"sender.", "owner."}) {
      if (ParameterState(role + codec).takes(name, state)) return true;
    }
  }
  return false;
}

}  // namespace

void Feedback::load(const AlgorithmState& state, const std::vector<at::Tensor>& parameters) {
  checkThatAllAreTaken(state, [&](const std::string& name) { return isOfAnyCodec(name, state); });
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
  steps_.reset();
}

}  // namespace bagua::compressed
