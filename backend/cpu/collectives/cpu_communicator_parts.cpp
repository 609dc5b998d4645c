// SPDX-License-Identifier: Apache-2.0
// The collectives of CpuCommunicator in which every rank has a part of its own.

#include <algorithm>
#include <numeric>

#include "backend/cpu/collectives/all_to_all_sizes.h"
#include "backend/cpu/collectives/cpu_communicator.h"
#include "backend/cpu/collectives/reduction.h"
#include "backend/operation/peer_errors.h"
#include "backend/operation/tensor_bytes.h"
#include "backend/os/scratch_memory.h"

namespace bagua {
namespace {

using Span = SharedMemoryExchange::Span;

// For every n, where the n-th part of each member lies; empty for a member that has fewer.
std::vector<std::vector<Span>> spansInTurns(const std::vector<std::vector<int>>& partsOfMembers, int64_t length) {
  size_t most = 0;
  for (const auto& parts : partsOfMembers) most = std::max(most, parts.size());
  std::vector<std::vector<Span>> turns(most);
  for (size_t turn = 0; turn < most; ++turn) {
    for (const auto& parts : partsOfMembers) {
      turns[turn].push_back(turn < parts.size() ? Span{parts[turn] * length, length} : Span{});
    }
  }
  return turns;
}

}  // namespace

PartOwners CpuCommunicator::everybody() {
  std::vector<int> ranks(size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return among(std::move(ranks));
}

const AgreedLine& CpuCommunicator::agreedLineOfAll() {
  std::vector<int> ranks(size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return lines_[ranks];
}

CpuCommunicator::PartsOfMembers CpuCommunicator::partsOfMembers() const {
  const int ownHost = connections_.ownHost();
  PartsOfMembers parts;
  for (const int member : connections_.members()) {
    auto& own = parts.emplace_back(1, member);
    for (int peer = 0; peer < size(); ++peer) {
      if (hosts().hostOf(peer) != ownHost && connections_.partnerOn(ownHost, peer) == member) own.push_back(peer);
    }
  }
  return parts;
}

void CpuCommunicator::allGather(at::Tensor& output, const at::Tensor& input) {
  if (input.numel() == 0) return;
  connect();
  at::Tensor all = bytesOf(output);
  const at::Tensor own = bytesOf(input);
  const int64_t bytes = own.numel();
  const auto partOf = [&](int peer) { return all.narrow(0, peer * bytes, bytes); };
  if (hosts().maxRanksPerHost() == 1 && size() > 1) {
    partOf(rank()).copy_(own);
    return everybody().gather(all, agreedLineOfAll());
  }
  Exchanges exchanges{{rank(), own, partOf(rank())}};
  for (int step = 1; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    const int host = hosts().hostOf(peer);
    if (host == connections_.ownHost()) continue;
    const bool isSent = connections_.partnerOn(host, rank()) == peer;
    const bool isReceived = connections_.partnerOn(connections_.ownHost(), peer) == rank();
    if (isSent || isReceived) {
      exchanges.push_back({peer, isSent ? own : Wire::nothing(), isReceived ? partOf(peer) : Wire::nothing()});
    }
  }
  exchange(exchanges);
  if (!sharedMemory()) return;
  for (const auto& spans : spansInTurns(partsOfMembers(), bytes)) {
    sharedMemory()->gather(all, spans, deadline());
    countShown(spans[sharedMemory()->rank()].length * (sharedMemory()->size() - 1));
  }
}

void CpuCommunicator::reducePartsInMemory(std::vector<at::Tensor>& reduced, const at::Tensor& prepared,
                                          const PartsOfMembers& parts, const ReduceOp& op) {
  const auto turns = spansInTurns(parts, reduced.front().numel());
  for (size_t turn = 0; turn < turns.size(); ++turn) {
    const auto& spans = turns[turn];
    int64_t shown = -spans[sharedMemory()->rank()].length;
    for (const auto& span : spans) shown += span.length;
    countShown(shown * itemSize(prepared));
    at::Tensor target = turn < reduced.size() ? reduced[turn] : reduced.front().narrow(0, 0, 0);
    sharedMemory()->reduceSpans(target, prepared, spans, op, size(), deadline());
  }
}

std::vector<at::Tensor> CpuCommunicator::reducePartsInHost(const at::Tensor& prepared, int64_t length,
                                                           const PartsOfMembers& parts, const ReduceOp& op) {
  // Where other hosts divide before they hand on, so does a rank that is alone on its host.
  const bool isDivided = !sharedMemory() && hosts().maxRanksPerHost() > 1 && op == ReduceOp::AVG;
  std::vector<at::Tensor> reduced;
  for (const int part : parts[hosts().localRank(rank())]) {
    const at::Tensor own = prepared.narrow(0, part * length, length);
    reduced.push_back(sharedMemory() || isDivided ? scratchLike(own) : own);
    if (isDivided) reduction::reduceParts({own.const_data_ptr()}, op, size(), reduced.back());
  }
  if (sharedMemory()) reducePartsInMemory(reduced, prepared, parts, op);
  return reduced;
}

void CpuCommunicator::reduceScatter(at::Tensor& output, const at::Tensor& input, const ReduceOp& op) {
  if (output.numel() == 0) return;
  connect();
  const at::Tensor prepared = reduction::prepare(flatOf(input), op);
  at::Tensor result = flatOf(output);
  const bool isInTwoSteps = hosts().maxRanksPerHost() > 1 && !connections_.isOneHost();
  const auto steps = isInTwoSteps ? reduction::inTwoSteps(op, result.scalar_type()) : reduction::TwoSteps{op, op};
  const auto parts = partsOfMembers();
  const auto& own = parts[hosts().localRank(rank())];
  const auto reduced = reducePartsInHost(prepared, result.numel(), parts, steps.first);
  if (connections_.isOneHost() && sharedMemory()) {
    result.copy_(reduced.front());
    return;
  }
  Exchanges exchanges;
  for (size_t index = 1; index < own.size(); ++index) {
    exchanges.push_back({own[index], bytesOf(reduced[index]), Wire::nothing()});
  }
  std::vector<const void*> copies;
  for (int host = 0; host < hosts().hostCount(); ++host) {
    if (host == connections_.ownHost()) {
      copies.push_back(reduced.front().const_data_ptr());
    } else {
      const int partner = connections_.partnerOn(host, rank());
      exchanges.push_back({partner, Wire::nothing(), scratchTensor({result.numel() * itemSize(result)}, at::kByte)});
      copies.push_back(exchanges.back().received.const_data_ptr());
    }
  }
  exchange(exchanges);
  reduction::reduceHosts(copies, steps.second, size(), result);
}

void CpuCommunicator::allToAll(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                               const Splits& inputSplits) {
  connect();
  const bool isRefused = !inputSplits.empty() && inputSplits.front() == kRefused;
  const RankParts parts{.received = bytesOfParts(output, outputSplits, size()),
                        .sent = bytesOfParts(input, isRefused ? Splits(size(), 0) : inputSplits, size())};
  const bool hasOwnSizes = program().commonNumel == Operation::kAnyNumel;
  if (hasOwnSizes) {
    connections_.wire().compareAgain();
    checkAllToAllSizes(connections_, parts, itemSize(input), isRefused, deadline());
  }
  const int root = program().peer;
  Exchanges exchanges;
  for (int step = 0; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    if (hosts().hostOf(peer) == connections_.ownHost() && sharedMemory()) continue;
    const bool isEmpty = parts.sent[peer].numel() == 0 && parts.received[peer].numel() == 0;
    // Two ranks that have nothing for each other by their own account compare that too.
    const bool isCompared = hasOwnSizes && (root < 0 || root == peer || root == rank());
    if (!isEmpty || isCompared) exchanges.push_back({peer, parts.sent[peer], parts.received[peer]});
  }
  exchange(exchanges);
  if (!sharedMemory()) return;
  for (const int member : connections_.members()) {
    if (member != rank()) countShown(parts.sent[member].numel());
  }
  // Not skipped when this rank has nothing to send or receive: the others may have.
  connections_.exchangeInHost(parts, deadline());
}

void CpuCommunicator::allGatherInPieces(at::Tensor& output, const at::Tensor& input, const Pipeline& pipeline) {
  if (size() == 1) return Communicator::allGatherInPieces(output, input, pipeline);
  connect();
  if (hosts().maxRanksPerHost() > 1) return Communicator::allGatherInPieces(output, input, pipeline);
  // One piece, which is coded before it leaves however it goes.
  if (size() > reduction::kMostInOrder && input.numel() <= Wire::kPieceBytes) {
    pipeline.beforeSending(0, input.numel());
    output.narrow(0, rank() * input.numel(), input.numel()).copy_(input);
    everybody().gather(output, agreedLineOfAll());
    return pipeline.afterReceiving(0, input.numel());
  }
  Exchanges exchanges;
  for (int step = 1; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    exchanges.push_back({peer, input, output.narrow(0, peer * input.numel(), input.numel())});
  }
  exchange(exchanges, pipeline);
}

void CpuCommunicator::allToAllInPieces(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                                       const Splits& inputSplits, const Pipeline& pipeline) {
  if (size() == 1) return Communicator::allToAllInPieces(output, input, outputSplits, inputSplits, pipeline);
  connect();
  const auto sent = bytesOfParts(input, inputSplits, size());
  const auto received = bytesOfParts(output, outputSplits, size());
  for (const int member : connections_.members()) {
    // All of them or none have parts for each other.
    if (member != rank() && (sent[member].numel() > 0 || received[member].numel() > 0)) {
      return Communicator::allToAllInPieces(output, input, outputSplits, inputSplits, pipeline);
    }
  }
  Exchanges exchanges;
  for (int step = 1; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    exchanges.push_back({peer, sent[peer], received[peer]});
  }
  exchange(exchanges, pipeline);
}

}  // namespace bagua
