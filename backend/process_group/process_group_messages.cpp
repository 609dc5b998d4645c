// SPDX-License-Identifier: Apache-2.0
// Point-to-point operations of ProcessGroupBagua.
#include "backend/process_group/process_group_bagua.h"

namespace bagua {

using c10d::OpType;
using WorkPtr = ProcessGroupBagua::WorkPtr;

WorkPtr ProcessGroupBagua::send(std::vector<at::Tensor>& tensors, int destination, int tag) try {
  constexpr const char* kName = "bagua:send";
  const at::Tensor tensor = checks(kName).single(tensors);
  checks(kName).rowMajor(tensor, "tensor");
  checks(kName).rank(destination, "destination");
  TORCH_CHECK_VALUE(destination != rank_, checks(kName).where(), ": a rank cannot send to itself");
  return messageExecutorFor(tensor.device())
      ->send(operation(OpType::SEND, kName, tensor, options_->timeout, destination), tensor, tag);
} catch (...) {
  dropCoalescing();
  throw;
}

WorkPtr ProcessGroupBagua::recv(std::vector<at::Tensor>& tensors, int source, int tag) try {
  constexpr const char* kName = "bagua:recv";
  const at::Tensor tensor = checks(kName).single(tensors);
  checks(kName).rowMajor(tensor, "tensor");
  checks(kName).rank(source, "source");
  TORCH_CHECK_VALUE(source != rank_, checks(kName).where(), ": a rank cannot receive from itself");
  return messageExecutorFor(tensor.device())
      ->receive(operation(OpType::RECV, kName, tensor, options_->timeout, source), tensor, tag);
} catch (...) {
  dropCoalescing();
  throw;
}

WorkPtr ProcessGroupBagua::recvAnysource(std::vector<at::Tensor>& tensors, int tag) try {
  constexpr const char* kName = "bagua:recvAnySource";
  const at::Tensor tensor = checks(kName).single(tensors);
  checks(kName).rowMajor(tensor, "tensor");
  return messageExecutorFor(tensor.device())
      ->receive(operation(OpType::RECVANYSOURCE, kName, tensor, options_->timeout, MessageExecutor::kAnySource), tensor,
                tag);
} catch (...) {
  dropCoalescing();
  throw;
}

}  // namespace bagua
