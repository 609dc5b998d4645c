// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "algorithms/algorithm.h"
#include "algorithms/options.h"
#include "backend/executor.h"

namespace bagua {

struct HookStats {
  int64_t steps = 0;
  int64_t buckets = 0;
  // Bytes of gradients that this rank handed to the hook.
  int64_t logicalBytes = 0;
  // Bytes that this rank sent to other ranks for them.
  int64_t wireBytes = 0;
  StageSeconds seconds;
};

// An algorithm at work on one model: turns each bucket that DDP hands over into a program and counts what it costs.
// Shared by the Reducer's hook and the handle that the user holds; safe to call from several threads.
class HookRunner final {
 public:
  HookRunner(const std::string& algorithm, const std::map<std::string, OptionValue>& options,
             std::shared_ptr<ExecutorProvider> executors);

  // Called by DDP for every bucket of every step, on an autograd thread. The future holds the tensor that DDP copies
  // the gradients from: the bucket's own buffer.
  c10::intrusive_ptr<c10::ivalue::Future> run(c10d::GradBucket& gradients);

  // Collective. Throws on every rank unless all ranks have registered the same algorithm and options for a model of the
  // same `parameters` (a text that the caller makes of them).
  void checkAgreement(const std::string& parameters, at::Device device);

  // From the next bucket on the gradients are averaged in full precision, as by DDP without a hook.
  void detach();

  [[nodiscard]] HookStats stats() const;
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const Options& options() const { return options_; }

 private:
  // Programs in flight hold these, and not the runner: it owns the executor that they run on.
  struct Ledger {
    std::mutex mutex;
    HookStats stats;
  };
  static void reduce(Algorithm& algorithm, Ledger& ledger, at::Tensor& gradients, Communicator& communicator);

  const std::string name_;
  const Options options_;
  const std::shared_ptr<ExecutorProvider> executors_;
  const std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();
  // Guarded by the ledger's mutex.
  std::shared_ptr<Algorithm> algorithm_;
};

// The form that c10d::Reducer owns.
class CommHook final : public c10d::CommHookInterface {
 public:
  explicit CommHook(std::shared_ptr<HookRunner> runner) : runner_(std::move(runner)) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override { return runner_->run(bucket); }
  at::Tensor parseHookResult(const c10::IValue& result) override {
    return c10d::detail::parseCppCommHookResult(result);
  }

 private:
  const std::shared_ptr<HookRunner> runner_;
};

}  // namespace bagua
