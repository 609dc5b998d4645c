// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/rounds/measurement.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace bagua::rounds {
namespace {

// The first steps allocate memory, and open connections.
constexpr int64_t kSettling = 4;
constexpr int64_t kTimed = 4;
// An exchange that takes longer is waited for, once.
constexpr int64_t kBesideExchange = 8;

double secondsSince(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Also on a device, where to wait for a program only makes the stream wait.
void waitUntilOver(c10d::Work& work) {
  while (!work.isCompleted()) std::this_thread::sleep_for(std::chrono::microseconds(500));
  work.wait(kNoTimeout);
}

// Every rank takes the longest step that one had, and the shortest exchange: the last to come has not waited for
// others.
Measured agreed(const Measured& own, StepContext& context) {
  at::Tensor numbers = at::empty({2}, context.parameters().front().options().dtype(at::kDouble).requires_grad(false));
  numbers[0].fill_(own.stepsOfExchange);
  numbers[1].fill_(-own.stepSeconds);
  context
      .submitInBackground("bagua:agree_on_schedule", {numbers},
                          [numbers](Communicator& communicator, StageSeconds& seconds) mutable {
                            const Stage stage(seconds, stages::kAgreeOnSchedule);
                            communicator.allReduce(numbers, c10d::ReduceOp::MIN);
                          })
      ->wait(kNoTimeout);
  return {.stepSeconds = -numbers[1].item<double>(), .stepsOfExchange = numbers[0].item<double>()};
}

}  // namespace

double Measurement::stepSeconds() const {
  std::vector<double> sorted = seconds_;
  std::sort(sorted.begin(), sorted.end());
  return sorted[sorted.size() / 2];
}

std::optional<Measured> Measurement::afterStep(StepContext& context, const Exchange& begin) {
  const double taken = secondsSince(std::exchange(lastEnd_, Clock::now()));
  ++steps_;
  constexpr int64_t kBegin = kSettling + kTimed;
  if (steps_ > kSettling && steps_ <= kBegin) seconds_.push_back(taken);
  if (steps_ < kBegin) return std::nullopt;
  if (steps_ == kBegin) {
    exchange_ = begin();
    return std::nullopt;
  }
  if (!stepsOfExchange_ && exchange_->isCompleted()) stepsOfExchange_ = static_cast<double>(steps_ - kBegin);
  if (steps_ < kBegin + kBesideExchange) return std::nullopt;
  if (!stepsOfExchange_) {
    const auto waiting = Clock::now();
    waitUntilOver(*exchange_);
    stepsOfExchange_ = kBesideExchange + secondsSince(waiting) / std::max(stepSeconds(), 1e-6);
  }
  // An error of the exchange comes out here.
  stop();
  return agreed({.stepSeconds = stepSeconds(), .stepsOfExchange = *stepsOfExchange_}, context);
}

void Measurement::stop() {
  if (exchange_) std::exchange(exchange_, {})->wait(kNoTimeout);
}

}  // namespace bagua::rounds
