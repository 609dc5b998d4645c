// SPDX-License-Identifier: Apache-2.0
#include "algorithms/hook/hook_members.h"

#include <ATen/ops/full.h>

#include <utility>

namespace bagua {
namespace {

// In one number, of which the largest is asked for: the step, and below it the rank, counted from the last.
constexpr int64_t kRanks = int64_t{1} << 20;

HookMembers::Furthest furthestOf(int64_t step, ExecutorProvider& group, at::Device device) {
  const int64_t own = step * kRanks + (kRanks - 1 - group.identity().rank);
  at::Tensor largest = at::full({1}, own, at::dtype(at::kLong).device(device));
  const Operation operation{.type = c10d::OpType::ALLREDUCE,
                            .name = "bagua:agree_on_step",
                            .dtype = at::kLong,
                            .numel = 1,
                            .timeout = group.timeout()};
  group.executorFor(device)
      ->submit(operation, {largest},
               [largest](Communicator& communicator) mutable { communicator.allReduce(largest, c10d::ReduceOp::MAX); })
      ->wait(kNoTimeout);
  const auto found = largest.item<int64_t>();
  return {.step = found / kRanks, .rank = static_cast<int>(kRanks - 1 - found % kRanks)};
}

}  // namespace

void HookMembers::agree(Registration own, std::string arithmetic, at::Device device) {
  agreeOn(own, kOfRegistration, *group_, device);
  if (!arithmetic.empty()) agreeOn({arithmetic, ""}, kOfArithmetic, *group_, device);
  if (!agreed_) agreed_.emplace(Agreed{.own = std::move(own), .arithmetic = std::move(arithmetic), .device = device});
}

HookMembers::Furthest HookMembers::meetAgain(int64_t step, const std::string& text, at::Device device) {
  nextEpoch_ = group_->epoch();
  nextTopology_ = group_->topology();
  if (isDissolved_) return {.step = step};
  const Agreed before = agreed_.value_or(Agreed{.own = {text, ""}, .arithmetic = "", .device = device});
  agree(before.own, before.arithmetic, before.device);
  return furthestOf(step, *group_, before.device);
}

void HookMembers::follow() {
  const std::lock_guard<std::mutex> lock(mutex_);
  topology_ = std::move(nextTopology_);
  epoch_ = nextEpoch_;
}

}  // namespace bagua
