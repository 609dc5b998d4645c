// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backend/cuda/nccl_communicator.h"
#include "backend/cuda/stream_executor.h"
#include "backend/message_executor.h"

namespace bagua {

// Programs over NCCL communicators of our own. Each pair of ranks that exchanges messages outside a group gets a
// communicator and a stream for that, so that pairs wait neither for each other nor for programs.
class NcclExecutor final : public StreamExecutor, public MessageExecutor {
 public:
  struct Options {
    NcclApi& api;
    // This executor's alone; every rank of the group passes the same one.
    c10::intrusive_ptr<c10d::Store> store;
    at::Device device;
    std::shared_ptr<const HostTopology> topology;
    // How long the ranks of a communicator may take to come together.
    std::chrono::milliseconds timeout;
    bool isHighPriority;
    // Communicators for programs, taken in turns. The same on all ranks.
    int channels = 1;
  };

  NcclExecutor(const GroupIdentity& group, Options options, std::shared_ptr<OperationLog> health = nullptr);

  c10::intrusive_ptr<c10d::Work> submit(Operation operation, std::vector<at::Tensor> results, Program program) override;
  // Without tags: messages between two ranks match in the order of the calls.
  c10::intrusive_ptr<c10d::Work> send(Operation operation, at::Tensor tensor, int tag) override;
  c10::intrusive_ptr<c10d::Work> receive(Operation operation, at::Tensor tensor, int tag) override;
  // Between the two calls nothing is enqueued. Then programs run one after the other, since each may compute between
  // its calls, and messages that follow each other go as one exchange. All calls return the one Work.
  void startGroup() override;
  c10::intrusive_ptr<c10d::Work> endGroup() override;
  void dropGroup() override;

 private:
  // A program, or messages that form one exchange.
  struct Step {
    Operation operation;
    Program program;
    std::vector<NcclCommunicator::Message> messages;
  };
  struct Group {
    c10::intrusive_ptr<WorkCuda> work;
    std::vector<Step> steps;
    std::vector<at::Tensor> results;
    std::vector<at::cuda::CUDAEvent> ready;
  };

  c10::intrusive_ptr<c10d::Work> message(const Operation& operation, const at::Tensor& tensor, bool isSend);
  // Takes the step and returns the group's Work; outside a group it leaves the step alone and returns null.
  c10::intrusive_ptr<c10d::Work> defer(Step& step, const std::vector<at::Tensor>& results);
  static Launch launchOf(Group group);
  std::shared_ptr<StreamChannel> pairChannel(int peer);

  const Options options_;
  std::mutex groupMutex_;
  std::unique_ptr<Group> group_;
  std::mutex pairsMutex_;
  std::map<int, std::shared_ptr<StreamChannel>> pairs_;
};

// `store` is a part of the group's that no other executor has, the same on every rank. `device` has an index.
std::shared_ptr<MessageExecutor> makeNcclExecutor(const GroupIdentity& group,
                                                  const c10::intrusive_ptr<c10d::Store>& store, at::Device device,
                                                  const std::shared_ptr<const HostTopology>& topology,
                                                  std::chrono::milliseconds timeout, bool highPriorityStream,
                                                  std::shared_ptr<OperationLog> health);

}  // namespace bagua
