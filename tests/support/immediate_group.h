// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/executor.h"
#include "backend/process_group/work_bagua.h"
#include "tests/support/lone_communicator.h"

namespace bagua::testing {

// A group, and its executor, of a rank that hears nothing from others. Programs run in submit() and are then kept, as
// on a device that has not come to them yet.
class ImmediateGroup final : public Executor, public ExecutorProvider {
 public:
  // `hosts` names the host of each rank; this one is rank 0.
  explicit ImmediateGroup(const std::vector<std::string>& hosts = {"a"})
      : identity_{"pg", 0, static_cast<int>(hosts.size())}, topology_(std::make_shared<const HostTopology>(hosts)) {}

  // What isCapturing() says.
  bool capturing = false;
  // What epoch() says.
  uint64_t number = 0;
  std::vector<Operation> operations;
  std::vector<Program> programs;

  c10::intrusive_ptr<c10d::Work> submit(Operation operation, std::vector<at::Tensor> results,
                                        Program program) override {
    program(communicator_);
    programs.push_back(std::move(program));
    auto work = c10::make_intrusive<WorkBagua>(0, operation, std::move(results));
    operations.push_back(std::move(operation));
    static_cast<void>(work->complete());
    return work;
  }
  void abort(const std::string& /*reason*/) override {}
  void shutdown() override {}
  [[nodiscard]] std::exception_ptr error() const override { return nullptr; }
  [[nodiscard]] uint64_t submitted() const override { return operations.size(); }

  // Not kept by what it returns, as the test holds it.
  std::shared_ptr<Executor> executorFor(at::Device /*device*/) override { return {std::shared_ptr<void>(), this}; }
  [[nodiscard]] bool isCapturing(at::Device /*device*/) const override { return capturing; }
  [[nodiscard]] uint64_t epoch() const override { return number; }
  [[nodiscard]] GroupIdentity identity() const override { return identity_; }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return std::chrono::seconds(60); }
  [[nodiscard]] std::shared_ptr<const HostTopology> topology() const override { return topology_; }

 private:
  const GroupIdentity identity_;
  const std::shared_ptr<const HostTopology> topology_;
  LoneCommunicator communicator_;
};

}  // namespace bagua::testing
