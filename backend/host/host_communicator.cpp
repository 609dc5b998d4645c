// SPDX-License-Identifier: Apache-2.0
#include "backend/host/host_communicator.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "backend/config.h"
#include "backend/host/reduction.h"
#include "backend/tensor_bytes.h"

namespace bagua {
namespace {

// Bounds the scratch memory of an allreduce (one bucket can be the whole model in the first iteration of DDP).
constexpr int64_t kPieceBytes = int64_t{32} << 20;
// Up to this size one exchange of everything is faster than two of parts.
constexpr int64_t kSmallBytes = int64_t{8} << 10;

using Splits = Communicator::Splits;

// From this size on a network's own sum is faster than ours over it, for it sends one part while it adds another: 42 MB
// between two hosts at 1 Gbit/s took 440 ms instead of 680 ms in a training step.
constexpr int64_t kNetworkSumBytes = int64_t{256} << 10;

// Where rounding is as good as ours: it is not for 16-bit floats, which a network would round at every rank.
bool isForTheNetwork(const at::Tensor& flat, const c10d::ReduceOp& op) {
  const bool isSum = op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG;
  const bool isExact = flat.scalar_type() == at::kFloat || flat.scalar_type() == at::kDouble;
  return isSum && isExact && static_cast<int64_t>(flat.nbytes()) >= kNetworkSumBytes;
}

Splits inBytes(const Splits& elements, int64_t itemSize) {
  Splits bytes(elements);
  for (auto& count : bytes) count *= itemSize;
  return bytes;
}

}  // namespace

HostCommunicator::HostCommunicator(std::unique_ptr<Communicator> network, std::shared_ptr<const HostTopology> topology)
    : Communicator(network->rank(), network->size(), std::move(topology)), network_(std::move(network)) {}

SharedMemoryExchange* HostCommunicator::sharedMemory() {
  if (!std::exchange(hasLookedForSharedMemory_, true) && size() > 1 && topology().hostCount() == 1 &&
      config::usesSharedMemory()) {
    auto made = SharedMemoryExchange::make(*network_, deadline());
    const std::lock_guard<std::mutex> lock(mutex_);
    sharedMemory_ = std::move(made);
  }
  return sharedMemory_.get();
}

template <typename Call>
void HostCommunicator::onNetwork(Call&& call) {
  network_->setDeadline(std::chrono::steady_clock::now() + remaining());
  const Traffic before = network_->traffic();
  call(*network_);
  countSent(network_->traffic().since(before));
}

void HostCommunicator::broadcast(at::Tensor& tensor, int root) {
  if (size() == 1 || tensor.numel() == 0) return;
  at::Tensor bytes = bytesOf(tensor);
  if (auto* const shared = sharedMemory()) {
    if (rank() == root) countSentToEach(bytes.numel());
    return shared->broadcast(bytes, root, deadline());
  }
  onNetwork([&](Communicator& network) { network.broadcast(bytes, root); });
}

void HostCommunicator::allReduce(at::Tensor& tensor, const ReduceOp& op) {
  if (tensor.numel() == 0) return;
  at::Tensor flat = flatOf(tensor);
  const auto itemSize = static_cast<int64_t>(flat.element_size());
  if (auto* const shared = sharedMemory()) {
    countSentEvenly(2 * flat.numel() * itemSize * (size() - 1) / size());
    return shared->allReduce(flat, reduction::prepare(flat, op), op, deadline());
  }
  if (isForTheNetwork(flat, op)) {
    onNetwork([&](Communicator& network) { network.allReduce(flat, ReduceOp::SUM); });
    if (op == ReduceOp::AVG) flat.div_(size());
    return;
  }
  // Whole parts only, so that every rank reduces the same number of elements; the rest is small.
  const int64_t pieceNumel = std::max<int64_t>(kPieceBytes / itemSize / size(), 1) * size();
  int64_t begin = 0;
  while (begin < flat.numel()) {
    const int64_t left = flat.numel() - begin;
    const int64_t numel =
        left * itemSize <= kSmallBytes || left < size() ? left : std::min(pieceNumel, left / size() * size());
    at::Tensor piece = flat.narrow(0, begin, numel);
    if (numel * itemSize <= kSmallBytes || numel < size()) {
      allReduceSmall(piece, op);
    } else {
      allReducePiece(piece, op);
    }
    begin += numel;
  }
}

void HostCommunicator::allReduceSmall(const at::Tensor& piece, const ReduceOp& op) {
  at::Tensor own = reduction::prepare(piece, op);
  at::Tensor copies = at::empty({size() * piece.numel()}, piece.options());
  allGather(copies, own);
  reduction::reduceCopies(copies, size(), op, piece);
}

void HostCommunicator::allReducePiece(at::Tensor& piece, const ReduceOp& op) {
  const at::Tensor own = reduction::prepare(piece, op);
  at::Tensor copies = at::empty_like(piece);
  allToAll(copies, own, {}, {});
  at::Tensor part = at::empty({piece.numel() / size()}, piece.options());
  reduction::reduceCopies(copies, size(), op, part);
  allGather(piece, part);
}

void HostCommunicator::reduce(at::Tensor& tensor, int root, const ReduceOp& op) {
  if (tensor.numel() == 0) return;
  const at::Tensor flat = flatOf(tensor);
  const at::Tensor own = reduction::prepare(flat, op);
  if (auto* const shared = sharedMemory()) {
    countSentTo(root, static_cast<int64_t>(flat.nbytes()));
    at::Tensor result = flat;
    return shared->reduce(result, own, root, op, deadline());
  }
  Splits inputSplits(size(), 0);
  inputSplits[root] = flat.numel();
  const bool isRoot = rank() == root;
  at::Tensor copies = at::empty({isRoot ? size() * flat.numel() : 0}, flat.options());
  allToAll(copies, own, Splits(size(), isRoot ? flat.numel() : 0), inputSplits);
  if (isRoot) reduction::reduceCopies(copies, size(), op, flat);
}

void HostCommunicator::allGather(at::Tensor& output, const at::Tensor& input) {
  if (input.numel() == 0) return;
  at::Tensor outputBytes = bytesOf(output);
  const at::Tensor inputBytes = bytesOf(input);
  if (size() == 1) {
    outputBytes.copy_(inputBytes);
    return;
  }
  if (auto* const shared = sharedMemory()) {
    countSentToEach(inputBytes.numel());
    return shared->allGather(outputBytes, inputBytes, deadline());
  }
  onNetwork([&](Communicator& network) { network.allGather(outputBytes, inputBytes); });
}

void HostCommunicator::reduceScatter(at::Tensor& output, const at::Tensor& input, const ReduceOp& op) {
  if (output.numel() == 0) return;
  const at::Tensor own = reduction::prepare(flatOf(input), op);
  if (auto* const shared = sharedMemory()) {
    countSentToEach(static_cast<int64_t>(output.nbytes()));
    at::Tensor result = flatOf(output);
    return shared->reduceScatter(result, own, op, deadline());
  }
  at::Tensor copies = at::empty_like(own);
  allToAll(copies, own, {}, {});
  reduction::reduceCopies(copies, size(), op, flatOf(output));
}

void HostCommunicator::allToAll(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                                const Splits& inputSplits) {
  at::Tensor outputBytes = bytesOf(output);
  const at::Tensor inputBytes = bytesOf(input);
  if (size() == 1) {
    outputBytes.copy_(inputBytes);
    return;
  }
  const auto itemSize = static_cast<int64_t>(input.element_size());
  if (auto* const shared = sharedMemory()) {
    countSentParts(input, inputSplits);
    return shared->allToAll(outputBytes, inputBytes, inBytes(outputSplits, itemSize), inBytes(inputSplits, itemSize),
                            deadline());
  }
  // Not skipped when this rank has nothing to send or receive: the others may have.
  onNetwork([&](Communicator& network) {
    network.allToAll(outputBytes, inputBytes, inBytes(outputSplits, itemSize), inBytes(inputSplits, itemSize));
  });
}

void HostCommunicator::barrier() {
  if (size() == 1) return;
  if (auto* const shared = sharedMemory()) return shared->barrier(deadline());
  onNetwork([](Communicator& network) { network.barrier(); });
}

void HostCommunicator::abort() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (sharedMemory_) sharedMemory_->abort();
  }
  network_->abort();
}

}  // namespace bagua
