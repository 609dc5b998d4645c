// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/communicator.h"
#include "backend/cuda/nccl_handle.h"

namespace bagua {

// CUDA tensors over NCCL. Every call enqueues on the current stream and returns; a call that only moves data moves
// bytes, of any dtype. The communicator is made by the first call, on every rank.
class NcclCommunicator final : public Communicator {
 public:
  struct Environment {
    NcclApi& api;
    at::Device device;
    // Opens the handle; collective.
    std::function<void(NcclHandle&)> connect;
    std::function<cudaStream_t()> currentStream;
    // For what making communicators takes beyond connect().
    std::chrono::milliseconds timeout;
    // Runs first in each thread that calls NCCL for a while.
    std::function<void()> prepareThread;
  };

  // One side of a message. NCCL has no tags: messages between two ranks match in the order of the calls.
  struct Message {
    bool isSend;
    int peer;
    at::Tensor tensor;
  };

  NcclCommunicator(int rank, int size, std::shared_ptr<const HostTopology> topology, Environment environment);

  void broadcast(at::Tensor& tensor, int root) override;
  void allReduce(at::Tensor& tensor, const ReduceOp& op) override;
  void reduce(at::Tensor& tensor, int root, const ReduceOp& op) override;
  void allGather(at::Tensor& output, const at::Tensor& input) override;
  void reduceScatter(at::Tensor& output, const at::Tensor& input, const ReduceOp& op) override;
  void allToAll(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                const Splits& inputSplits) override;
  // Where there are several hosts, over a communicator of the ranks of each. It is made with the one of all ranks, when
  // no call of that can be under way yet, as NCCL demands.
  void reduceScatterInHost(at::Tensor& flat, const Splits& parts, int64_t divisor) override;
  void allGatherInHost(at::Tensor& flat, const Splits& parts) override;
  void barrier() override;
  // All of them at once: none waits for another.
  void exchange(const std::vector<Message>& messages);

  void abort() override;
  // Returns what has gone wrong since the last call; empty: nothing. Any thread may call.
  [[nodiscard]] std::string asyncError();
  // Collective, after the last program: ends in order, or aborts where the peers do not follow in time.
  void close(std::chrono::steady_clock::time_point deadline);
  // The calls of the next program are recorded into a CUDA graph.
  void enterGraph();
  // Returns how many calls have reached NCCL: a program that fails before its first has left no rank out of step. A
  // connection that failed counts as one; it leaves the handle aborted.
  [[nodiscard]] uint64_t calls() const { return calls_ + (handle_.isAborted() ? 1 : 0); }

 private:
  using Enqueue = std::function<ncclResult_t(ncclComm_t, cudaStream_t)>;
  // The part for (or from) each rank, in rank order.
  [[nodiscard]] std::vector<Message> partsOf(const at::Tensor& tensor, const Splits& splits, bool isSend) const;
  [[nodiscard]] std::vector<Message> messagesOf(const at::Tensor& output, const at::Tensor& input,
                                                const Splits& outputSplits, const Splits& inputSplits) const;
  // As one group: no call waits for another.
  ncclResult_t enqueueTogether(const std::vector<std::function<ncclResult_t()>>& calls);
  ncclResult_t enqueueMessages(const std::vector<Message>& messages, ncclComm_t comm, cudaStream_t stream);
  void onComm(const char* what, const Enqueue& enqueue) { onComm(handle_, what, enqueue); }
  void onComm(NcclHandle& handle, const char* what, const Enqueue& enqueue);
  void connect();
  [[nodiscard]] bool hasInHostStages() const;
  [[nodiscard]] NcclHandle& inHost() { return hasInHostStages() ? inHost_ : handle_; }
  void countSentIn(const std::vector<Message>& messages);
  // Calls `enqueue` with NCCL's dtype, count factor and operation.
  template <typename EnqueueReduction>
  void reduceOnComm(const char* what, const at::Tensor& tensor, const ReduceOp& op, EnqueueReduction&& enqueue);

  const Environment environment_;
  NcclApi& api_;
  NcclHandle handle_;
  NcclHandle inHost_;
  uint64_t calls_ = 0;
};

}  // namespace bagua
