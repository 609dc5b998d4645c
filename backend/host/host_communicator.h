// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "backend/communicator.h"

namespace bagua {

// CPU tensors. A network that only has to move bytes (Gloo) carries the data; reductions are done here, in rank order
// and with 16-bit floats accumulated in 32 bits, so that the result is the same bits on every rank and every run, for
// every dtype and operation. Steps and bytes per rank of an allreduce of N bytes: all-to-all of N (n-1)/n, reduction of
// the own part, all-gather of N (n-1)/n.
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

 private:
  // Runs one call on the network and takes over its byte count and our deadline.
  template <typename Call>
  void onNetwork(Call&& call);
  void allReducePiece(at::Tensor& piece, const ReduceOp& op);
  void allReduceSmall(const at::Tensor& piece, const ReduceOp& op);

  const std::unique_ptr<Communicator> network_;
};

}  // namespace bagua
