// SPDX-License-Identifier: Apache-2.0
#include "algorithms/hook/hook_members.h"

#include <ATen/ops/full.h>

#include <utility>

namespace bagua {
namespace {

int64_t largestOf(int64_t step, ExecutorProvider& group, at::Device device) {
  at::Tensor largest = at::full({1}, step, at::dtype(at::kLong).device(device));
  const Operation operation{.type = c10d::OpType::ALLREDUCE,
                            .name = "bagua:agree_on_step",
                            .dtype = at::kLong,
                            .numel = 1,
                            .timeout = group.timeout()};
  group.executorFor(device)
      ->submit(operation, {largest},
               [largest](Communicator& communicator) mutable { communicator.allReduce(largest, c10d::ReduceOp::MAX); })
      ->wait(kNoTimeout);
  return largest.item<int64_t>();
}

}  // namespace

void HookMembers::agree(Registration own, std::string arithmetic, at::Device device) {
  agreeOn(own, kOfRegistration, *group_, device);
  if (!arithmetic.empty()) agreeOn({arithmetic, ""}, kOfArithmetic, *group_, device);
  agreed_.emplace(Agreed{.own = std::move(own), .arithmetic = std::move(arithmetic), .device = device});
}

int64_t HookMembers::meetAgain(int64_t step, const std::string& text, at::Device device) {
  const uint64_t epoch = group_->epoch();
  auto topology = group_->topology();
  if (!isDissolved_) {
    const Agreed before = agreed_.value_or(Agreed{.own = {text, ""}, .arithmetic = "", .device = device});
    agree(before.own, before.arithmetic, before.device);
    step = largestOf(step, *group_, before.device);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  topology_ = std::move(topology);
  epoch_ = epoch;
  return step;
}

}  // namespace bagua
