// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>

#include "backend/communicator.h"
#include "backend/host/shared_memory/shared_memory_exchange.h"

namespace bagua {

// CPU tensors. Ranks of one host exchange them through shared memory, found at the first call. Otherwise a network that
// only has to move bytes (Gloo) carries the data; steps and bytes per rank of an allreduce of N bytes: all-to-all of
// N (n-1)/n, reduction of the own part, all-gather of N (n-1)/n. Reductions are done here either way, in rank order and
// with 16-bit floats accumulated in 32 bits, but for large sums of 32- and 64-bit floats over a network, which it adds
// up itself. The result is the same bits on every rank and every run, for every dtype and operation.
class HostCommunicator final : public Communicator {
 public:
  explicit HostCommunicator(std::unique_ptr<Communicator> network, std::shared_ptr<const HostTopology> topology);

  void broadcast(at::Tensor& tensor, int root) override;
  void allReduce(at::Tensor& tensor, const ReduceOp& op) override;
  void reduce(at::Tensor& tensor, int root, const ReduceOp& op) override;
  void allGather(at::Tensor& output, const at::Tensor& input) override;
  void reduceScatter(at::Tensor& output, const at::Tensor& input, const ReduceOp& op) override;
  void allToAll(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                const Splits& inputSplits) override;
  void barrier() override;
  void abort() override;
  [[nodiscard]] bool canBeInterrupted() const override { return sharedMemory_ != nullptr; }

 private:
  // Runs one call on the network and takes over its byte count and our deadline.
  template <typename Call>
  void onNetwork(Call&& call);
  void allReducePiece(at::Tensor& piece, const ReduceOp& op);
  void allReduceSmall(const at::Tensor& piece, const ReduceOp& op);

  // Null where tensors go through the network.
  SharedMemoryExchange* sharedMemory();
  [[nodiscard]] SharedMemoryExchange::Deadline deadline() const {
    return std::chrono::steady_clock::now() + remaining();
  }

  const std::unique_ptr<Communicator> network_;
  bool hasLookedForSharedMemory_ = false;
  // Guards the pointer, which abort() follows from another thread.
  std::mutex mutex_;
  std::unique_ptr<SharedMemoryExchange> sharedMemory_;
};

}  // namespace bagua
