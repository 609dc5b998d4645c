// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "algorithms/shared/guard/guard.h"
#include "algorithms/stage.h"
#include "backend/communicator.h"

namespace bagua {

struct HookStats {
  // Synchronised backwards, and buckets in them.
  int64_t steps = 0;
  int64_t buckets = 0;
  // Times that the ranks communicated for the sake of a step.
  int64_t rounds = 0;
  // Bytes of gradients or weights that this rank had to communicate.
  int64_t logicalBytes = 0;
  // What this rank sent to other ranks for them.
  Traffic traffic;
  StageSeconds::Totals seconds;
  // Memory that the algorithm keeps between steps.
  int64_t stateBytes = 0;
  // What the algorithm holds beside the model, in bytes.
  std::map<std::string, int64_t> memory;
  // Since the registration.
  Guard::Report guard;
  // The algorithm has chosen these for options that were left to it.
  std::map<std::string, int64_t> chosen;
};

// Counts what a hook's steps and programs cost. Programs in flight hold it, and not the runner: that owns the executor
// that they run on. Any thread may call.
class HookLedger : public std::enable_shared_from_this<HookLedger> {
 public:
  // A program holds this as long as it may touch a tensor, which can be longer than its Work takes to fail.
  [[nodiscard]] std::shared_ptr<HookLedger> lend();
  // Returns whether all programs have let go of it.
  [[nodiscard]] bool waitForPrograms(std::chrono::milliseconds limit);
  void countBucket();
  // The end of a synchronised backward. Lets go of what programs of earlier steps have used to time themselves.
  void countStep();
  void countRound();
  // What is about to travel.
  void countLogicalBytes(const std::vector<at::Tensor>& tensors);
  // What a program has sent and how long its stages took, which `seconds` no longer holds then.
  void add(const Traffic& traffic, StageSeconds& seconds);
  // These replace what was noted before.
  void noteMemory(std::map<std::string, int64_t> bytes);
  void noteChosen(std::map<std::string, int64_t> values);

  // The ledger leaves out stateBytes and guard, which the algorithm knows.
  [[nodiscard]] HookStats stats();
  // Counts from zero again; memory and what was chosen stay what they are.
  void reset();

 private:
  std::mutex mutex_;
  std::condition_variable returned_;
  int64_t lent_ = 0;
  HookStats stats_;
  StageSeconds seconds_;
};

}  // namespace bagua
