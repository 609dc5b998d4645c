// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "backend/communicator.h"

namespace bagua {

// A Communicator over any c10d backend (Gloo, NCCL, ...), through the virtuals of c10d::Backend alone. Waits for every
// operation: for CPU tensors that blocks, for CUDA tensors it orders the current stream behind it.
class BackendCommunicator final : public Communicator {
 public:
  BackendCommunicator(c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<const HostTopology> topology,
                      at::Device device);

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
  void wait(const c10::intrusive_ptr<c10d::Work>& work);

  const c10::intrusive_ptr<c10d::Backend> backend_;
  // The tensors that it is given are there.
  const at::Device device_;
};

}  // namespace bagua
