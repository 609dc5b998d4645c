// SPDX-License-Identifier: Apache-2.0
#include "algorithms/hook/parameter_use.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace bagua {
namespace {

// Before a gradient is added to .grad. DDP's own hook comes after that, and may hand the gradient over.
class Mark final : public torch::autograd::FunctionPreHook {
 public:
  Mark(std::shared_ptr<std::vector<std::atomic<bool>>> flags, size_t position)
      : flags_(std::move(flags)), position_(position) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    (*flags_)[position_] = true;
    return gradients;
  }

 private:
  const std::shared_ptr<std::vector<std::atomic<bool>>> flags_;
  const size_t position_;
};

}  // namespace

ParameterUse::ParameterUse(const std::vector<at::Tensor>& parameters)
    : parameters_(parameters), flags_(std::make_shared<Flags>(parameters.size())) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    // DDP keeps it, and the hook with it. (2.15 has pointers of another kind than 2.11.)
    const auto accumulator = torch::autograd::impl::grad_accumulator(parameters[i]);
    accumulator->add_pre_hook(std::make_unique<Mark>(flags_, i));
  }
}

// Where a backward came by that had no gradient to give, and none lay there, DDP takes the parameter for unused.
bool ParameterUse::take(int64_t position) {
  return (*flags_)[position].exchange(false) && parameters_[position].grad().defined();
}

}  // namespace bagua
