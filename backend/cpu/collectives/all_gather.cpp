// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/collectives/cpu_communicator.h"
#include "backend/cpu/collectives/reduction.h"
#include "backend/operation/tensor_bytes.h"

namespace bagua {

void CpuCommunicator::allGather(at::Tensor& output, const at::Tensor& input) {
  if (input.numel() == 0) return moveNothing();
  connect();
  at::Tensor all = bytesOf(output);
  const at::Tensor own = bytesOf(input);
  const int64_t bytes = own.numel();
  const auto partOf = [&](int peer) { return all.narrow(0, peer * bytes, bytes); };
  if (hosts().maxRanksPerHost() == 1 && size() > 1) {
    partOf(rank()).copy_(own);
    return gatherAmongAll(all);
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

void CpuCommunicator::allGatherInPieces(at::Tensor& output, const at::Tensor& input, const Pipeline& pipeline) {
  if (size() == 1) return Communicator::allGatherInPieces(output, input, pipeline);
  connect();
  if (hosts().maxRanksPerHost() > 1) return Communicator::allGatherInPieces(output, input, pipeline);
  // One piece, which is coded before it leaves however it goes.
  if (size() > reduction::kMostInOrder && input.numel() <= Wire::kPieceBytes) {
    pipeline.beforeSending(0, input.numel());
    output.narrow(0, rank() * input.numel(), input.numel()).copy_(input);
    gatherAmongAll(output);
    return pipeline.afterReceiving(0, input.numel());
  }
  Exchanges exchanges;
  for (int step = 1; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    const at::Tensor theirs = output.narrow(0, peer * input.numel(), input.numel());
    exchanges.push_back({.peer = peer, .sent = input, .received = theirs, .isKept = true});
  }
  exchange(exchanges, pipeline);
}

// After a round each owner has what all in its range have, which lies together.
void PartOwners::gather(at::Tensor& bytes, const AgreedLine& agreed) const {
  const int64_t each = bytes.numel() / count();
  const auto of = [&](const Halves::Range& range) { return bytes.narrow(0, range.begin * each, range.size() * each); };
  int level = halves_.levels();
  const int rounds = count() <= reduction::kMostInOrder ? 1 : agreed.roundsFor(halves_);
  for (const int levels : halves_.levelsOfRounds(rounds)) {
    const auto peers = halves_.peersOf(ownHost_, level, levels);
    const int first = halves_.slotOf(ownHost_, level) - peers.ownPart;
    const at::Tensor own = of(halves_.range(level, first + peers.ownPart));
    Wire::Exchanges exchanges;
    for (const int part : peers.otherParts()) {
      const at::Tensor theirs = of(halves_.range(level, first + part));
      for (const auto& [peer, isTold, isHeard] : peers.ofPart(part)) {
        exchanges.push_back({ranks_[peer], isTold ? own : Wire::nothing(), isHeard ? theirs : Wire::nothing()});
      }
    }
    exchange(exchanges);
    level -= levels;
  }
}

}  // namespace bagua
