// SPDX-License-Identifier: Apache-2.0
// What a checkpoint keeps of Rounds.
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <set>
#include <utility>

#include "algorithms/shared/rounds/rounds.h"

namespace bagua::rounds {
namespace {

std::string numbered(const char* name, size_t number) { return std::string(name) + "." + std::to_string(number); }

// All that a state can hold.
std::set<std::string> namesOf(size_t fragments, size_t buckets, size_t buffers) {
  std::set<std::string> names = {"step", "has_started", "is_paused", "is_in_step", "measured", "chosen_after"};
  const auto add = [&](std::initializer_list<const char*> kinds, size_t count) {
    for (const char* const kind : kinds) {
      for (size_t number = 0; number < count; ++number) names.insert(numbered(kind, number));
    }
  };
  add({"synchronised_after", "on_its_way"}, fragments);
  add({"means", "outer_weights", "outer_momentum", "residual", "owner_residual"}, buckets);
  add({"buffers"}, buffers);
  return names;
}

}  // namespace

AlgorithmState Rounds::shared() const {
  AlgorithmState state{{"step", counterTensor(step_)},
                       {"has_started", counterTensor(hasStarted_ ? 1 : 0)},
                       {"is_paused", counterTensor(isPaused_ ? 1 : 0)},
                       {"is_in_step", counterTensor(isInStep_ ? 1 : 0)}};
  for (size_t number = 0; number < fragments_.size(); ++number) {
    const Fragment& fragment = fragments_[number];
    if (fragment.synchronisedAfter >= 0) {
      state.emplace(numbered("synchronised_after", number), counterTensor(fragment.synchronisedAfter));
    }
  }
  if (measured_) {
    state.emplace("measured", at::tensor({measured_->stepSeconds, measured_->stepsOfExchange}, at::kDouble));
    state.emplace("chosen_after", counterTensor(chosenAfter_));
  }
  const FragmentBuckets buckets = allBuckets();
  for (size_t number = 0; number < buckets.size() && hasStarted_; ++number) {
    const FragmentBucket& bucket = *buckets[number];
    state.emplace(numbered("outer_weights", number), bucket.outer.weights.clone());
    if (bucket.outer.hasMomentum) state.emplace(numbered("outer_momentum", number), bucket.outer.momentum.clone());
  }
  return state;
}

AlgorithmState Rounds::state() const {
  // It writes to the outer weights.
  for (const auto& fragment : fragments_) {
    if (fragment.exchange && fragment.exchange->work) fragment.exchange->work->wait(kNoTimeout);
  }
  AlgorithmState state = shared();
  for (size_t number = 0; number < fragments_.size(); ++number) {
    const auto& exchange = fragments_[number].exchange;
    if (!exchange) continue;
    state.emplace(numbered("on_its_way", number), counterTensor(1));
    for (size_t i = 0; i < exchange->buffers.size(); ++i) {
      state.emplace(numbered("buffers", i), exchange->buffers[i].clone());
    }
    for (size_t i = 0; i < exchange->means.size(); ++i) {
      state.emplace(numbered("means", i), exchange->means[i].clone());
    }
  }
  const FragmentBuckets buckets = allBuckets();
  for (size_t number = 0; number < buckets.size() && hasStarted_; ++number) {
    if (!buckets[number]->residual.defined()) continue;
    state.emplace(numbered("residual", number), buckets[number]->residual.clone());
    state.emplace(numbered("owner_residual", number), buckets[number]->ownerResidual.clone());
  }
  return state;
}

void Rounds::load(const AlgorithmState& state, StepContext& context) {
  // A state that is refused changes nothing.
  const int64_t step = counterOf(state, "step");
  const bool hasStarted = settings_.outer && counterOf(state, "has_started") != 0;
  const bool isPaused = counterOf(state, "is_paused") != 0;
  // Older checkpoints are of whole steps.
  const bool isInStep = state.contains("is_in_step") && counterOf(state, "is_in_step") != 0;
  // The run that goes on chooses as the one that has measured.
  const bool isChosen = !settings_.schedule.isWhole() && state.contains("measured");
  std::optional<Measured> measured;
  if (isChosen) {
    const at::Tensor numbers = tensorOf(state, "measured", at::zeros({2}, at::kDouble));
    measured = {.stepSeconds = numbers[0].item<double>(), .stepsOfExchange = numbers[1].item<double>()};
  }
  const int64_t chosenAfter = isChosen ? counterOf(state, "chosen_after") : 0;
  if (fragments_.empty()) makeFragments(context);
  std::vector<Loaded> loaded;
  const FragmentBuckets buckets = allBuckets();
  const std::set<std::string> names = namesOf(fragments_.size(), buckets.size(), buffers_.size());
  checkThatAllAreTaken(state, [&](const std::string& name) { return names.contains(name); });
  for (size_t number = 0; number < buckets.size() && hasStarted; ++number) {
    loaded.push_back(loadedBucket(state, number, *buckets[number], context));
  }
  std::vector<Fragment> fragments = loadedFragments(state, hasStarted);

  // What is on its way writes to the buckets.
  for (const auto& fragment : fragments_) {
    if (fragment.exchange && fragment.exchange->work) fragment.exchange->work->wait(kNoTimeout);
  }
  measurement_.stop();
  measurement_ = {};
  if (!settings_.schedule.isWhole()) schedule_.reset();
  measured_ = measured;
  chosenAfter_ = chosenAfter;
  step_ = step;
  isPaused_ = isPaused;
  isInStep_ = isInStep;
  hasStarted_ = hasStarted;
  fragments_ = std::move(fragments);
  for (size_t number = 0; number < loaded.size(); ++number) {
    FragmentBucket& bucket = *buckets[number];
    bucket.outer = std::move(loaded[number].outer);
    bucket.residual = std::move(loaded[number].residual);
    bucket.ownerResidual = std::move(loaded[number].ownerResidual);
    allocate(bucket, context.rank());
  }
  if (measured_) useChoice(context);
  if (hasStarted || !settings_.outer) noteMemory(context);
}

std::vector<Rounds::Fragment> Rounds::loadedFragments(const AlgorithmState& state, bool hasStarted) const {
  std::vector<Fragment> fragments;
  for (size_t number = 0; number < fragments_.size(); ++number) {
    Fragment& fragment = fragments.emplace_back(Fragment{.buckets = fragments_[number].buckets});
    const std::string synchronised = numbered("synchronised_after", number);
    if (state.contains(synchronised)) fragment.synchronisedAfter = counterOf(state, synchronised);
    if ((settings_.outer && !hasStarted) || !state.contains(numbered("on_its_way", number))) continue;
    Exchange& exchange = fragment.exchange.emplace();
    for (size_t i = 0; !settings_.outer && i < fragment.buckets.size(); ++i) {
      exchange.means.push_back(tensorOf(state, numbered("means", i), fragment.buckets[i]->weights.pack()));
    }
    if (number + 1 < fragments_.size()) continue;
    for (size_t i = 0; i < buffers_.size(); ++i) {
      exchange.buffers.push_back(tensorOf(state, numbered("buffers", i), buffers_[i].pack()));
    }
  }
  return fragments;
}

Rounds::Loaded Rounds::loadedBucket(const AlgorithmState& state, size_t number, const FragmentBucket& bucket,
                                    const StepContext& context) const {
  const auto options = at::TensorOptions(context.parameters().front().device());
  const at::Tensor like = at::empty({bucket.weights.numel()}, options.dtype(bucket.dtype));
  Loaded loaded{.outer = {.weights = tensorOf(state, numbered("outer_weights", number), like)}};
  const std::string momentum = numbered("outer_momentum", number);
  if (state.contains(momentum)) {
    loaded.outer.momentum = tensorOf(state, momentum, like);
    loaded.outer.hasMomentum = true;
  }
  const std::string residual = numbered("residual", number);
  if (!isCoded() || !settings_.errorFeedback || !state.contains(residual)) return loaded;
  loaded.residual = tensorOf(state, residual, at::empty({bucket.weights.numel()}, options.dtype(at::kFloat)));
  // Of another number of ranks it is of other elements: what it held back is lost.
  const std::string owner = numbered("owner_residual", number);
  const at::Tensor likeOwned = at::zeros({ownedOf(bucket, context.rank())}, options.dtype(at::kFloat));
  const auto entry = state.find(owner);
  const bool isSame = entry != state.end() && entry->second.sizes() == likeOwned.sizes();
  loaded.ownerResidual = isSame ? tensorOf(state, owner, likeOwned) : likeOwned;
  return loaded;
}

}  // namespace bagua::rounds
