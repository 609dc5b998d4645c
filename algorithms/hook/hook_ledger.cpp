// SPDX-License-Identifier: Apache-2.0
#include "algorithms/hook/hook_ledger.h"

#include <ATen/core/Tensor.h>

#include <utility>

namespace bagua {

std::shared_ptr<HookLedger> HookLedger::lend() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++lent_;
  }
  return {this, [self = shared_from_this()](HookLedger* /*lent*/) {
            {
              const std::lock_guard<std::mutex> lock(self->mutex_);
              --self->lent_;
            }
            self->returned_.notify_all();
          }};
}

bool HookLedger::waitForPrograms(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  return returned_.wait_for(lock, limit, [this] { return lent_ == 0; });
}

void HookLedger::countBucket() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++stats_.buckets;
}

void HookLedger::countStep() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++stats_.steps;
  static_cast<void>(seconds_.totals());
}

void HookLedger::countRound() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++stats_.rounds;
}

void HookLedger::countLogicalBytes(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += tensor.is_sparse() ? 0 : static_cast<int64_t>(tensor.nbytes());
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.logicalBytes += bytes;
}

void HookLedger::add(const Traffic& traffic, StageSeconds& seconds) {
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.traffic += traffic;
  seconds_.take(seconds);
}

void HookLedger::noteMemory(std::map<std::string, int64_t> bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.memory = std::move(bytes);
}

void HookLedger::noteChosen(std::map<std::string, int64_t> values) {
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.chosen = std::move(values);
}

HookStats HookLedger::stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  HookStats stats = stats_;
  stats.seconds = seconds_.totals();
  return stats;
}

void HookLedger::reset() {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto memory = std::move(stats_.memory);
  auto chosen = std::move(stats_.chosen);
  stats_ = {};
  seconds_.reset();
  stats_.memory = std::move(memory);
  stats_.chosen = std::move(chosen);
}

}  // namespace bagua
