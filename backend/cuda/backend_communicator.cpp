// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/backend_communicator.h"

#include <ATen/ops/zeros.h>

#include "backend/operation/tensor_bytes.h"

namespace bagua {
namespace {

int64_t bytes(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

}  // namespace

BackendCommunicator::BackendCommunicator(c10::intrusive_ptr<c10d::Backend> backend,
                                         std::shared_ptr<const HostTopology> topology, at::Device device)
    : Communicator(backend->getRank(), backend->getSize(), std::move(topology)),
      backend_(std::move(backend)),
      device_(device) {}

void BackendCommunicator::wait(const c10::intrusive_ptr<c10d::Work>& work) {
  // NCCL takes a finite wait as a request to block the thread; its own watchdog enforces the timeout of the operation.
  if (work) work->wait(kNoTimeout);
}

void BackendCommunicator::broadcast(at::Tensor& tensor, int root) {
  std::vector<at::Tensor> tensors{flatOf(tensor)};
  wait(backend_->broadcast(tensors, {.rootRank = root, .timeout = remaining()}));
  if (rank() == root) countSentToEach(bytes(tensor));
}

void BackendCommunicator::allReduce(at::Tensor& tensor, const ReduceOp& op) {
  std::vector<at::Tensor> tensors{flatOf(tensor)};
  wait(backend_->allreduce(tensors, {.reduceOp = op, .timeout = remaining()}));
  countSentEvenly(2 * bytes(tensor) * (size() - 1) / size());
}

void BackendCommunicator::reduce(at::Tensor& tensor, int root, const ReduceOp& op) {
  // Backends may use the buffers of the other ranks as scratch; ours promise to leave them alone.
  std::vector<at::Tensor> tensors{rank() == root ? flatOf(tensor) : flatOf(tensor).clone()};
  wait(backend_->reduce(tensors, {.reduceOp = op, .rootRank = root, .timeout = remaining()}));
  if (rank() != root) countSentTo(root, bytes(tensor));
}

void BackendCommunicator::allGather(at::Tensor& output, const at::Tensor& input) {
  at::Tensor flatOutput = flatOf(output);
  at::Tensor flatInput = flatOf(input);
  wait(backend_->_allgather_base(flatOutput, flatInput, {.timeout = remaining()}));
  countSentToEach(bytes(input));
}

void BackendCommunicator::reduceScatter(at::Tensor& output, const at::Tensor& input, const ReduceOp& op) {
  at::Tensor flatOutput = flatOf(output);
  at::Tensor flatInput = flatOf(input);
  wait(backend_->_reduce_scatter_base(flatOutput, flatInput, {.reduceOp = op, .timeout = remaining()}));
  countSentToEach(bytes(output));
}

void BackendCommunicator::allToAll(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                                   const Splits& inputSplits) {
  const c10d::AllToAllOptions options{.timeout = remaining()};
  at::Tensor flatOutput = flatOf(output);
  at::Tensor flatInput = flatOf(input);
  Splits mutableOutputSplits = outputSplits;
  Splits mutableInputSplits = inputSplits;
  wait(backend_->alltoall_base(flatOutput, flatInput, mutableOutputSplits, mutableInputSplits, options));
  countSentParts(input, inputSplits);
}

void BackendCommunicator::barrier() {
  // NCCL's own guesses the device by the rank, and has the CPU wait for it.
  std::vector<at::Tensor> token{at::zeros({1}, at::TensorOptions().dtype(at::kByte).device(device_))};
  wait(backend_->allreduce(token, {.timeout = remaining()}));
}

void BackendCommunicator::abort() { backend_->abort(); }

}  // namespace bagua
