// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/collectives/cpu_communicator.h"

#include <algorithm>
#include <utility>

#include "backend/cpu/collectives/reduction.h"
#include "backend/operation/tensor_bytes.h"
#include "backend/os/scratch_memory.h"

namespace bagua {

CpuCommunicator::CpuCommunicator(std::unique_ptr<Wire> wire, const std::shared_ptr<const HostTopology>& topology)
    : Communicator(wire->rank(), wire->size(), topology), connections_(std::move(wire), topology) {}

void CpuCommunicator::setProgram(const ProgramFingerprint& program) {
  Communicator::setProgram(program);
  connections_.setProgram(program);
}

void CpuCommunicator::countShown(int64_t bytes) { countSent({.inHostBytes = bytes, .betweenHostsBytes = 0}); }

void CpuCommunicator::exchange(const Exchanges& exchanges, const Pipeline& pipeline, const Exchanges& forwarded) {
  for (const auto* const sent : {&exchanges, &forwarded}) {
    for (const auto& exchange : *sent) countSentTo(exchange.peer, exchange.sent.numel());
  }
  connections_.wire().exchangeInPieces(exchanges, pipeline, forwarded, deadline());
}

PartOwners CpuCommunicator::among(std::vector<int> owners) {
  const auto exchangeInPieces = [this](const Exchanges& exchanges, const Pipeline& pipeline,
                                       const Exchanges& forwarded) { exchange(exchanges, pipeline, forwarded); };
  return {std::move(owners), connections_.ownHost(), size(), exchangeInPieces};
}

PartOwners::LineTo CpuCommunicator::lines() {
  return [this](int peer) { return connections_.wire().lineTo(peer); };
}

// --- Steps inside a host ---------------------------------------------------------------------------------------------

namespace {

// In a flat tensor, one after another.
std::vector<SharedMemoryExchange::Span> spansOf(const Communicator::Splits& parts) {
  std::vector<SharedMemoryExchange::Span> spans;
  int64_t begin = 0;
  for (const int64_t part : parts) {
    spans.push_back({begin, part});
    begin += part;
  }
  return spans;
}

}  // namespace

void CpuCommunicator::reduceParts(at::Tensor& flat, const at::Tensor& prepared, const Splits& parts, const ReduceOp& op,
                                  int64_t contributors) {
  const auto spans = spansOf(parts);
  const Span& span = spans[sharedMemory()->rank()];
  at::Tensor own = flat.narrow(0, span.begin, span.length);
  countShown((flat.numel() - span.length) * itemSize(flat));
  sharedMemory()->reduceSpans(own, prepared, spans, op, contributors, deadline());
}

void CpuCommunicator::gatherParts(at::Tensor& flat, const Splits& parts) {
  countShown(parts[sharedMemory()->rank()] * itemSize(flat) * (sharedMemory()->size() - 1));
  sharedMemory()->gather(flat, spansOf(parts), deadline());
}

c10d::ReduceOp CpuCommunicator::reduceToOwnLanes(at::Tensor& flat, const at::Tensor& prepared, const HostLanes& lanes,
                                                 const ReduceOp& op) {
  if (lanes.count() == 1) {
    if (!prepared.is_same(flat)) flat.copy_(prepared);
    return op;
  }
  const auto steps = reduction::inTwoSteps(op, flat.scalar_type());
  if (sharedMemory()) {
    reduceParts(flat, prepared, lanes.partsInHost(), steps.first, size());
  } else if (steps.first == ReduceOp::AVG || !prepared.is_same(flat)) {
    reduction::reduceParts({prepared.const_data_ptr()}, steps.first, size(), flat);
  }
  return steps.second;
}

void CpuCommunicator::reduceScatterInHost(at::Tensor& flat, const Splits& parts, int64_t divisor) {
  if (flat.numel() == 0) return;
  connect();
  if (!shareMemoryInHosts()) return Communicator::reduceScatterInHost(flat, parts, divisor);
  if (sharedMemory()) {
    reduceParts(flat, flat, parts, divisor == 1 ? ReduceOp::SUM : ReduceOp::AVG, divisor);
  } else {
    divide(flat, divisor);
  }
}

void CpuCommunicator::allGatherInHost(at::Tensor& flat, const Splits& parts) {
  if (flat.numel() == 0) return;
  connect();
  if (!shareMemoryInHosts()) return Communicator::allGatherInHost(flat, parts);
  if (sharedMemory()) gatherParts(flat, parts);
}

// --- Collectives on a tensor as a whole: those on the parts of ranks are in cpu_communicator_parts.cpp --------------

void CpuCommunicator::broadcast(at::Tensor& tensor, int root) {
  if (size() == 1 || tensor.numel() == 0) return;
  connect();
  at::Tensor bytes = bytesOf(tensor);
  const int rootHost = hosts().hostOf(root);
  std::vector<int> leaders;
  for (int host = 0; host < hosts().hostCount(); ++host) {
    leaders.push_back(host == rootHost ? root : hosts().ranksOf(host).front());
  }
  const int leader = leaders[connections_.ownHost()];
  if (!connections_.isOneHost() && rank() == leader) {
    const auto& agreed = lines_[leaders];
    among(std::move(leaders)).broadcastFrom(rootHost, bytes, agreed);
  }
  if (!sharedMemory()) return;
  if (rank() == leader) countShown(bytes.numel() * (sharedMemory()->size() - 1));
  sharedMemory()->broadcast(bytes, hosts().localRank(leader), deadline());
}

void CpuCommunicator::allReduce(at::Tensor& tensor, const ReduceOp& op) {
  if (tensor.numel() == 0) return;
  connect();
  at::Tensor flat = flatOf(tensor);
  const at::Tensor prepared = reduction::prepare(flat, op);
  if (connections_.isOneHost() && sharedMemory()) {
    countShown(2 * static_cast<int64_t>(flat.nbytes()) * (size() - 1) / size());
    return sharedMemory()->allReduce(flat, prepared, op, deadline());
  }
  const HostLanes lanes(hosts(), rank(), flat.numel());
  const ReduceOp betweenHosts = reduceToOwnLanes(flat, prepared, lanes, op);
  for (int lane = lanes.firstLane(rank()); lane < lanes.endLane(rank()); ++lane) {
    at::Tensor own = flat.narrow(0, lanes.begin(lane), lanes.length(lane));
    auto owners = lanes.owners(lane);
    auto& agreed = lines_[owners];
    among(std::move(owners)).allReduce(own, betweenHosts, agreed, lines());
  }
  if (sharedMemory()) gatherParts(flat, lanes.partsInHost());
}

void CpuCommunicator::reduce(at::Tensor& tensor, int root, const ReduceOp& op) {
  if (tensor.numel() == 0) return;
  connect();
  at::Tensor flat = flatOf(tensor);
  const at::Tensor prepared = reduction::prepare(flat, op);
  if (connections_.isOneHost() && sharedMemory()) {
    if (rank() != root) countShown(static_cast<int64_t>(flat.nbytes()));
    return sharedMemory()->reduce(flat, prepared, hosts().localRank(root), op, deadline());
  }
  const HostLanes lanes(hosts(), rank(), flat.numel());
  // Only the root's own tensor may change.
  at::Tensor result = rank() == root ? flat : scratchLike(flat);
  const ReduceOp betweenHosts = reduceToOwnLanes(result, prepared, lanes, op);
  const int host = hosts().hostOf(root);
  for (int lane = lanes.firstLane(rank()); lane < lanes.endLane(rank()); ++lane) {
    at::Tensor own = result.narrow(0, lanes.begin(lane), lanes.length(lane));
    auto owners = lanes.owners(lane);
    const auto& agreed = lines_[owners];
    among(std::move(owners)).reduceTo(host, own, betweenHosts, agreed);
  }
  if (connections_.ownHost() == host && sharedMemory()) gatherParts(result, lanes.partsInHost());
}

void CpuCommunicator::barrier() {
  if (size() == 1) return;
  connect();
  if (sharedMemory()) sharedMemory()->barrier(deadline());
  if (connections_.isOneHost()) return;
  if (rank() == connections_.members().front()) {
    std::vector<int> leaders;
    for (int host = 0; host < hosts().hostCount(); ++host) leaders.push_back(hosts().ranksOf(host).front());
    auto& agreed = lines_[leaders];
    among(std::move(leaders)).meet(agreed, lines(), deadline());
  }
  if (sharedMemory()) sharedMemory()->barrier(deadline());
}

}  // namespace bagua
