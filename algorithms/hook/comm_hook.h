// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "algorithms/hook/hook_runner.h"

namespace bagua {

// What runs where a model's hook is registered. c10d::Reducer takes one hook for ever, so that another algorithm comes
// to the same place, between two steps.
struct HookPlace {
  std::shared_ptr<HookRunner> runner;
};

// The form in which c10d::Reducer owns a hook.
class CommHook final : public c10d::CommHookInterface {
 public:
  explicit CommHook(std::shared_ptr<const HookPlace> place) : place_(std::move(place)) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    return place_->runner->run(bucket);
  }
  at::Tensor parseHookResult(const c10::IValue& result) override {
    return c10d::detail::parseCppCommHookResult(result);
  }

 private:
  const std::shared_ptr<const HookPlace> place_;
};

}  // namespace bagua
