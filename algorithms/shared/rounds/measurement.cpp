// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/rounds/measurement.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

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
// A step that takes so many times as long has waited for something.
constexpr double kWaiting = 3;

using Clock = Measurement::Clock;

double secondsBetween(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

// Also on a device, where to wait for a program only makes the stream wait.
void waitUntilOver(c10d::Work& work) {
  while (!work.isCompleted()) std::this_thread::sleep_for(std::chrono::microseconds(500));
  work.wait(kNoTimeout);
}

// Where the training only enqueues, a step is over when the device is done with it. The exchange is on another stream.
void awaitDevice(const StepContext& context) {
  const at::Device device = context.parameters().front().device();
  if (device.is_cpu()) return;
  c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
}

StepContext::Task leastOf(const at::Tensor& numbers) {
  return [numbers = numbers](Communicator& communicator, StageSeconds& seconds) mutable {
    const Stage stage(seconds, stages::kAgreeOnSchedule);
    communicator.allReduce(numbers, c10d::ReduceOp::MIN);
  };
}

}  // namespace

double Measurement::stepSeconds() const {
  std::vector<double> sorted = seconds_;
  std::sort(sorted.begin(), sorted.end());
  return std::max(sorted[sorted.size() / 2], 1e-6);
}

double Measurement::stepsBetween(Clock::time_point begin, Clock::time_point end) const {
  if (secondsBetween(begin, end) <= kWaiting * stepSeconds()) return 1;
  const Clock::time_point over = exchangeEnd_->load();
  if (over != Clock::time_point()) end = std::clamp(over, begin, end);
  return std::max(1.0, secondsBetween(begin, end) / stepSeconds());
}

std::optional<Measured> Measurement::afterStep(StepContext& context, const Exchange& begin) {
  constexpr int64_t kBegin = kSettling + kTimed;
  if (++steps_ >= kSettling) awaitDevice(context);
  const bool isOver = exchange_ && exchange_->isCompleted();
  const auto end = Clock::now();
  const auto before = std::exchange(lastEnd_, end);
  if (steps_ > kSettling && steps_ <= kBegin) seconds_.push_back(secondsBetween(before, end));
  if (steps_ == kBegin) exchange_ = begin(exchangeEnd_);
  if (steps_ <= kBegin) return std::nullopt;
  stepsBeside_ += stepsBetween(before, end);
  if (isOver) {
    stepsOfExchange_ = stepsBeside_;
    // An error of the exchange comes out here.
    std::exchange(exchange_, {})->wait(kNoTimeout);
  }
  if (steps_ < kBegin + kBesideExchange) return std::nullopt;
  if (agreement_) {
    stop();
    if (!std::exchange(hasAskedShards_, true)) agreement_ = beginAgreementAmongShards(context);
    if (agreement_) return std::nullopt;
    return Measured{.stepSeconds = -agreed_[1].item<double>(), .stepsOfExchange = agreed_[0].item<double>()};
  }
  if (exchange_) {
    const auto waiting = Clock::now();
    waitUntilOver(*std::exchange(exchange_, {}));
    stepsOfExchange_ = stepsBeside_ + secondsBetween(waiting, Clock::now()) / stepSeconds();
  }
  beginAgreement(context);
  return std::nullopt;
}

// Every rank takes the longest step that one had, and the shortest exchange: the last to come has not waited for
// others.
void Measurement::beginAgreement(StepContext& context) {
  hasAskedShards_ = false;
  agreed_ = at::empty({2}, context.parameters().front().options().dtype(at::kDouble).requires_grad(false));
  agreed_[0].fill_(*stepsOfExchange_);
  agreed_[1].fill_(-stepSeconds());
  agreement_ = context.submitInBackground("bagua:agree_on_schedule", {agreed_}, leastOf(agreed_));
}

// The parts of a model follow one schedule: each of them is trained in the same steps.
c10::intrusive_ptr<c10d::Work> Measurement::beginAgreementAmongShards(StepContext& context) {
  return context.submitAmongShards("bagua:agree_on_schedule", {agreed_}, leastOf(agreed_));
}

void Measurement::stop() {
  for (auto* const work : {&exchange_, &agreement_}) {
    if (*work) std::exchange(*work, {})->wait(kNoTimeout);
  }
}

}  // namespace bagua::rounds
