// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/executor.h"
#include "backend/health/group_health.h"
#include "backend/os/process_mark.h"

namespace bagua {

// Lets hooks run on CUDA tensors of a model whose process group is of another backend: an executor over that backend's
// own operations, as the order of enqueueing is the order on every rank. Hooks on CPU tensors get a group of ours.
class BackendExecutors final : public ExecutorProvider {
 public:
  // `records` are what every rank's ownRecord() says; ValueError where they do not agree. `globalRanks` as for
  // GroupHealth.
  BackendExecutors(c10::intrusive_ptr<c10d::Backend> backend, const std::string& groupName,
                   const std::vector<std::string>& records, std::chrono::milliseconds timeout,
                   std::vector<uint64_t> globalRanks);
  ~BackendExecutors() override;

  std::shared_ptr<Executor> executorFor(at::Device device) override;
  [[nodiscard]] GroupIdentity identity() const override { return identity_; }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return timeout_; }
  [[nodiscard]] std::shared_ptr<const HostTopology> topology() const override { return topology_; }
  // As Executor's, for the device that was asked for, if one was. A forked child leaves its parent's alone.
  void shutdown();

 private:
  const ProcessMark mark_;
  const c10::intrusive_ptr<c10d::Backend> backend_;
  const GroupIdentity identity_;
  const std::shared_ptr<const HostTopology> topology_;
  const std::chrono::milliseconds timeout_;
  // Without a store: a backend for CUDA tensors has a watchdog itself.
  GroupHealth health_;
  std::mutex mutex_;
  std::optional<at::Device> device_;
  std::shared_ptr<Executor> executor_;
};

}  // namespace bagua
