// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/collectives/cpu_communicator.h"

#include <algorithm>
#include <numeric>
#include <utility>

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

void CpuCommunicator::gatherAmongAll(at::Tensor& bytes) {
  std::vector<int> ranks(size());
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto& agreed = lines_[ranks];
  among(std::move(ranks)).gather(bytes, agreed);
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

std::vector<std::vector<CpuCommunicator::Span>> CpuCommunicator::spansInTurns(const PartsOfMembers& partsOfMembers,
                                                                              int64_t length) {
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

}  // namespace bagua
