// SPDX-License-Identifier: Apache-2.0
// How Rounds finds what the user has left open of the schedule.
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <utility>

#include "algorithms/shared/compressed/mean.h"
#include "algorithms/shared/rounds/rounds.h"

namespace bagua::rounds {
namespace {

// In longer rounds the ranks go too far apart.
constexpr int64_t kLongestRound = 500;

int64_t elementsOf(const auto& fragment) {
  int64_t elements = 0;
  for (const auto& bucket : fragment.buckets) elements += bucket->weights.numel();
  return elements;
}

}  // namespace

void Rounds::chooseInStep(StepContext& context) {
  measured_ = measurement_.afterStep(context, [&](auto end) { return tryLine(context, std::move(end)); });
  if (!measured_) return;
  chosenAfter_ = step_;
  useChoice(context);
  if (!context.isSpeaker()) return;
  const bool isLong = schedule_->every() > kLongestRound;
  // A warning, as torch shows nothing below.
  LOG(WARNING) << "bagua: " << context.algorithm() << " goes on with sync_every=" << schedule_->every()
               << ", fragments=" << schedule_->fragments() << ", delay=" << schedule_->delay() << ": a step took "
               << 1e3 * measured_->stepSeconds << " ms, and the exchange of the longest fragment "
               << measured_->stepsOfExchange << " steps"
               << (isLong ? ". Such long rounds cost accuracy: use a codec of fewer bits, or a faster network" : "");
}

void Rounds::useChoice(StepContext& context) {
  schedule_ = chooseSchedule(settings_.schedule, static_cast<int64_t>(fragments_.size()), *measured_, chosenAfter_);
  context.noteChosen(
      {{"sync_every", schedule_->every()}, {"fragments", schedule_->fragments()}, {"delay", schedule_->delay()}});
}

c10::intrusive_ptr<c10d::Work> Rounds::tryLine(StepContext& context, std::shared_ptr<Measurement::End> end) const {
  const auto& longest = *std::max_element(fragments_.begin(), fragments_.end(), [](const auto& one, const auto& other) {
    return elementsOf(one) < elementsOf(other);
  });
  std::vector<at::Tensor> flats;
  for (const auto& bucket : longest.buckets) {
    const auto options = context.parameters().front().options().dtype(bucket->dtype).requires_grad(false);
    flats.push_back(at::zeros({bucket->weights.numel()}, options));
  }
  const auto codec = isCoded() ? settings_.codec->codec : nullptr;
  auto program = [flats, codec, hierarchical = settings_.hierarchical, end = std::move(end)](
                     Communicator& communicator, StageSeconds& seconds) mutable {
    for (auto& flat : flats) {
      const Stage stage(seconds, stages::kMeasureLine);
      if (codec) {
        StageSeconds unused;
        compressed::reduceToMean(flat, {.hierarchical = hierarchical}, {.codec = codec}, unused, communicator);
      } else {
        communicator.allReduce(flat, c10d::ReduceOp::AVG);
      }
    }
    if (flats.front().is_cpu()) *end = Measurement::Clock::now();
  };
  return context.submitInBackground("bagua:measure_line", flats, std::move(program));
}

}  // namespace bagua::rounds
