// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "algorithms/step_context.h"

namespace bagua::testing {

// Weights of a rank whose programs run at once, on the thread that submits them.
class ImmediateSteps final : public StepContext {
 public:
  ImmediateSteps(Communicator& communicator, const std::vector<at::Tensor>& parameters)
      : communicator_(communicator), parameters_(parameters) {}

  [[nodiscard]] const std::string& algorithm() const override { return name_; }
  [[nodiscard]] const std::vector<at::Tensor>& parameters() const override { return parameters_; }
  [[nodiscard]] const std::vector<int64_t>& layers() const override { return layers_; }
  [[nodiscard]] const std::vector<at::Tensor>& buffers() const override { return buffers_; }
  [[nodiscard]] int rank() const override { return communicator_.rank(); }
  [[nodiscard]] int size() const override { return communicator_.size(); }
  [[nodiscard]] bool isSpeaker() const override { return rank() == 0; }
  [[nodiscard]] const HostTopology& topology() const override { return communicator_.topology(); }
  void checkWeightsAreFree(const char* /*call*/) const override {}
  void checkThatAllCan(const char* /*call*/) override {}
  c10::intrusive_ptr<c10d::Work> submit(const char* name, const std::vector<at::Tensor>& tensors, Wait wait,
                                        Task task) override;
  c10::intrusive_ptr<c10d::Work> submitInBackground(const char* name, const std::vector<at::Tensor>& tensors,
                                                    Task task) override {
    return submit(name, tensors, Wait::kLater, std::move(task));
  }
  c10::intrusive_ptr<c10d::Work> submitAmongShards(const char* name, const std::vector<at::Tensor>& tensors,
                                                   Task task) override {
    return shards ? shards(name, tensors, std::move(task)) : c10::intrusive_ptr<c10d::Work>();
  }
  void countRound() override {}
  void noteMemory(std::map<std::string, int64_t> /*bytes*/) override {}
  void noteChosen(std::map<std::string, int64_t> /*values*/) override {}

  // What the ranks do that hold the other parts of the weights; none: these are whole.
  std::function<c10::intrusive_ptr<c10d::Work>(const char* name, const std::vector<at::Tensor>& tensors, Task task)>
      shards = {};

 private:
  const std::string name_ = "under test";
  Communicator& communicator_;
  const std::vector<at::Tensor>& parameters_;
  const std::vector<int64_t> layers_;
  const std::vector<at::Tensor> buffers_;
};

}  // namespace bagua::testing
