// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/backend_communicator.h"

#include "backend/operation/tensor_bytes.h"

namespace bagua {
namespace {

int64_t bytes(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

}  // namespace

BackendCommunicator::BackendCommunicator(c10::intrusive_ptr<c10d::Backend> backend,
                                         std::shared_ptr<const HostTopology> topology)
    : Communicator(backend->getRank(), backend->getSize(), std::move(topology)), backend_(std::move(backend)) {}

void BackendCommunicator::wait(const c10::intrusive_ptr<c10d::Work>& work) {
  // NCCL takes a finite wait as a request to block the thread; its own watchdog enforces the timeout of the operation.
  if (work) work->wait(kNoTimeout);
}

void BackendCommunicator::broadcast(at::Tensor& tensor, int root) {
  c10d::BroadcastOptions options;
  options.rootRank = root;
  options.timeout = remaining();
  std::vector<at::Tensor> tensors{flatOf(tensor)};
  wait(backend_->broadcast(tensors, options));
  if (rank() == root) countSentToEach(bytes(tensor));
}

void BackendCommunicator::allReduce(at::Tensor& tensor, const ReduceOp& op) {
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  options.timeout = remaining();
  std::vector<at::Tensor> tensors{flatOf(tensor)};
  wait(backend_->allreduce(tensors, options));
  countSentEvenly(2 * bytes(tensor) * (size() - 1) / size());
}

void BackendCommunicator::reduce(at::Tensor& tensor, int root, const ReduceOp& op) {
  c10d::ReduceOptions options;
  options.reduceOp = op;
  options.rootRank = root;
  options.timeout = remaining();
  // Backends may use the buffers of the other ranks as scratch; ours promise to leave them alone.
  std::vector<at::Tensor> tensors{rank() == root ? flatOf(tensor) : flatOf(tensor).clone()};
  wait(backend_->reduce(tensors, options));
  if (rank() != root) countSentTo(root, bytes(tensor));
}

void BackendCommunicator::allGather(at::Tensor& output, const at::Tensor& input) {
  c10d::AllgatherOptions options;
  options.timeout = remaining();
  at::Tensor flatOutput = flatOf(output);
  at::Tensor flatInput = flatOf(input);
  wait(backend_->_allgather_base(flatOutput, flatInput, options));
  countSentToEach(bytes(input));
}

void BackendCommunicator::reduceScatter(at::Tensor& output, const at::Tensor& input, const ReduceOp& op) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = op;
  options.timeout = remaining();
  at::Tensor flatOutput = flatOf(output);
  at::Tensor flatInput = flatOf(input);
  wait(backend_->_reduce_scatter_base(flatOutput, flatInput, options));
  countSentToEach(bytes(output));
}

void BackendCommunicator::allToAll(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                                   const Splits& inputSplits) {
  c10d::AllToAllOptions options;
  options.timeout = remaining();
  at::Tensor flatOutput = flatOf(output);
  at::Tensor flatInput = flatOf(input);
  Splits mutableOutputSplits = outputSplits;
  Splits mutableInputSplits = inputSplits;
  wait(backend_->alltoall_base(flatOutput, flatInput, mutableOutputSplits, mutableInputSplits, options));
  countSentParts(input, inputSplits);
}

void BackendCommunicator::barrier() {
  c10d::BarrierOptions options;
  options.timeout = remaining();
  wait(backend_->barrier(options));
}

void BackendCommunicator::abort() { backend_->abort(); }

}  // namespace bagua
