// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <thread>

#include "backend/cpu/messenger.h"
#include "backend/cpu/monitored_barrier.h"
#include "backend/cpu/program_queue.h"
#include "backend/health/group_health.h"
#include "backend/message_executor.h"

namespace bagua {

// Programs on CPU tensors: a ProgramQueue with a thread per channel, started with the channel's first program. A caller
// who waits for its operation anyway runs it itself where nothing else runs. Messages between two ranks go beside the
// queue.
class CpuExecutor final : public MessageExecutor {
 public:
  using Communicators = ProgramQueue::Communicators;

  // `health` looks after the operations; null: they are on their own.
  CpuExecutor(const GroupIdentity& group, Communicators channels, std::unique_ptr<Messenger> messenger,
              std::shared_ptr<OperationLog> health = nullptr);
  ~CpuExecutor() override;

  c10::intrusive_ptr<c10d::Work> submit(Operation operation, std::vector<at::Tensor> results, Program program) override;
  c10::intrusive_ptr<c10d::Work> send(Operation operation, at::Tensor tensor, int tag) override;
  c10::intrusive_ptr<c10d::Work> receive(Operation operation, at::Tensor tensor, int tag) override;
  void monitoredBarrier(std::chrono::milliseconds timeout, bool waitAllRanks) override;
  void startGroup() override;
  c10::intrusive_ptr<c10d::Work> endGroup() override;
  void dropGroup() override;
  void abort(const std::string& reason) override;
  void shutdown() override;
  [[nodiscard]] std::exception_ptr error() const override { return queue_->error(); }
  [[nodiscard]] uint64_t submitted() const override { return queue_->submitted(); }

 private:
  void startThread(size_t channel);
  void stop(std::chrono::milliseconds drainTime);
  c10::intrusive_ptr<c10d::Work> recordInGroup(const c10::intrusive_ptr<c10d::Work>& work);

  const GroupIdentity group_;
  const std::unique_ptr<Messenger> messenger_;
  MonitoredBarrier monitoredBarrier_;
  // Shared with the threads: one that is stuck in a transport outlives the executor after an abort.
  std::shared_ptr<ProgramQueue> queue_;
  std::mutex threadMutex_;
  // One per channel; not joinable: not started.
  std::vector<std::thread> threads_;

  std::mutex groupMutex_;
  bool inGroup_ = false;
  std::vector<c10::intrusive_ptr<c10d::Work>> groupParts_;
};

}  // namespace bagua
