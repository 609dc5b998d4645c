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

// What one program at a time runs over. `health` looks after the operations; null: they are on their own.
struct HostChannel {
  std::unique_ptr<Communicator> communicator;
  std::shared_ptr<GroupHealth::Track> health = nullptr;
};

// Programs on CPU tensors: a thread per channel, started with its first program, runs them. Programs that may overlap
// take the channels in turn, the same ones on every rank, and start in order; any other one has the executor to itself,
// on the first channel.
class HostExecutor final : public Executor {
 public:
  HostExecutor(const GroupIdentity& group, std::vector<HostChannel> channels, std::unique_ptr<MessageChannel> messages);
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
