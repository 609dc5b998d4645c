// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <thread>

#include "backend/executor.h"
#include "backend/health/group_health.h"
#include "backend/host/message_channel.h"
#include "backend/work_bagua.h"

namespace bagua {

// Programs on CPU tensors. Each communicator is a channel with a thread of its own, started with its first program. A
// program's sequence number chooses its channel, so that ranks which come with different programs find out. Programs
// start in order; one that may not overlap has the executor to itself.
class HostExecutor final : public Executor {
 public:
  using Communicators = std::vector<std::unique_ptr<Communicator>>;

  // `health` looks after the operations; null: they are on their own.
  HostExecutor(const GroupIdentity& group, Communicators channels, std::unique_ptr<MessageChannel> messages,
               std::shared_ptr<GroupHealth::Track> health = nullptr);
  ~HostExecutor() override;

  c10::intrusive_ptr<c10d::Work> submit(Operation operation, std::vector<at::Tensor> results, Program program) override;
  c10::intrusive_ptr<c10d::Work> send(Operation operation, at::Tensor tensor, int tag) override;
  c10::intrusive_ptr<c10d::Work> receive(Operation operation, at::Tensor tensor, int tag) override;
  void startGroup() override;
  c10::intrusive_ptr<c10d::Work> endGroup() override;
  void abort(const std::string& reason) override;
  void shutdown() override;
  [[nodiscard]] std::exception_ptr error() const override;
  [[nodiscard]] uint64_t submitted() const override;

 private:
  class Queue;
  void startThread(size_t channel);
  void stop(std::chrono::milliseconds drainTime);
  c10::intrusive_ptr<c10d::Work> recordInGroup(const c10::intrusive_ptr<c10d::Work>& work);

  const GroupIdentity group_;
  const std::unique_ptr<MessageChannel> messages_;
  // Shared with the thread: one that is stuck in a transport outlives the executor after an abort.
  std::shared_ptr<Queue> queue_;
  std::mutex threadMutex_;
  // One per channel; not joinable: not started.
  std::vector<std::thread> threads_;

  std::mutex groupMutex_;
  bool inGroup_ = false;
  std::vector<c10::intrusive_ptr<c10d::Work>> groupParts_;
};

}  // namespace bagua
