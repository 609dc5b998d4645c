// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "backend/executor.h"

namespace bagua::fuzz {

// Rank 0 of a group whose other members say whatever the fuzzer makes up. Programs run at once.
class LoneRank final : public Executor, public ExecutorProvider {
 public:
  // Fills what has been received. Of an allgather it finds there what peers would send that say the same as this rank.
  using Peers = std::function<void(void* bytes, size_t count)>;

  // `hosts` names the host of each rank; empty: a host each.
  LoneRank(int size, const std::vector<std::string>& hosts, Peers peers);

  [[nodiscard]] Communicator& communicator() { return *communicator_; }

  c10::intrusive_ptr<c10d::Work> submit(Operation operation, std::vector<at::Tensor> results, Program program) override;
  void abort(const std::string& /*reason*/) override {}
  void shutdown() override {}
  [[nodiscard]] std::exception_ptr error() const override { return nullptr; }
  [[nodiscard]] uint64_t submitted() const override { return 0; }

  // Not kept by what it returns, as the fuzzer holds it.
  std::shared_ptr<Executor> executorFor(at::Device /*device*/) override { return {std::shared_ptr<void>(), this}; }
  [[nodiscard]] GroupIdentity identity() const override { return identity_; }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return std::chrono::minutes(1); }
  [[nodiscard]] std::shared_ptr<const HostTopology> topology() const override {
    return std::make_shared<const HostTopology>(communicator_->topology());
  }

 private:
  const GroupIdentity identity_;
  const std::unique_ptr<Communicator> communicator_;
};

}  // namespace bagua::fuzz
