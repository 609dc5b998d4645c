// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "algorithms/step_context.h"

namespace bagua {

// One round of an average of weights that no rank waits for.
//
// The order of events: a thread that may read the weights makes the round of a snapshot, which submits one program.
// That runs on the executor's thread (on CUDA: stream) while the ranks train on: first a vote on the end, then the
// averages. A thread that may change the weights then waits for the round, and adds takeChange(), so that what the rank
// has learnt since the snapshot is kept. Every rank takes part in every round, and the next one begins when this one is
// over.
class AverageRound {
 public:
  using Clock = std::chrono::steady_clock;
  using Submit =
      std::function<c10::intrusive_ptr<c10d::Work>(const std::vector<at::Tensor>& tensors, StepContext::Task task)>;

  // `snapshots` are copies of the weights, at least one. `wantsToEnd`: this rank asks for no round after this one.
  AverageRound(std::vector<at::Tensor> snapshots, bool wantsToEnd, const Submit& submit);

  [[nodiscard]] bool isCompleted() const { return work_->isCompleted(); }
  // Waits; on CUDA the current stream does, and the host where this rank wants to end. Returns whether all ranks want
  // to: the same on all. Throws where it is not over at the deadline.
  [[nodiscard]] bool wait(Clock::time_point deadline = Clock::time_point::max()) const;

  // After wait(); of each snapshot one of the two, once. `average` has the type of the snapshot; the change, which is
  // the average less the snapshot, is of float32, of float64 for float64.
  [[nodiscard]] const at::Tensor& average(size_t snapshot) const { return outcome_->averages[snapshot]; }
  [[nodiscard]] at::Tensor takeChange(size_t snapshot);
  // When the program ended, as far as the host can know: on CUDA that is now.
  [[nodiscard]] Clock::time_point end() const;

 private:
  // What the program fills in.
  struct Outcome {
    std::vector<at::Tensor> averages;
    // On the device of the weights: whether all ranks want to end.
    at::Tensor isLast;
    // On the CPU, as a count of Clock. Not a Clock::time_point: that is no atomic everywhere.
    std::atomic<Clock::rep> end{0};
  };
  static std::shared_ptr<Outcome> begin(const std::vector<at::Tensor>& snapshots, bool wantsToEnd);

  const std::vector<at::Tensor> snapshots_;
  const bool wantsToEnd_;
  // Shared with the program, which may outlive us.
  const std::shared_ptr<Outcome> outcome_;
  const c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace bagua
