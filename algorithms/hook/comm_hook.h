// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "algorithms/hook/hook_runner.h"

namespace bagua {

// The form in which c10d::Reducer owns a hook.
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
