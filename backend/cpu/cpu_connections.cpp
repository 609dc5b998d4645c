// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/cpu_connections.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "backend/config.h"
#include "backend/cpu/collectives/part_owners.h"

namespace bagua {

CpuConnections::CpuConnections(std::unique_ptr<Wire> wire, std::shared_ptr<const HostTopology> topology)
    : wire_(std::move(wire)), topology_(std::move(topology)) {}

void CpuConnections::setProgram(const ProgramFingerprint& program) {
  wire_->setProgram(program);
  if (sharedMemory_) sharedMemory_->setProgram(program);
}

void CpuConnections::connect(const ProgramFingerprint& program, Deadline deadline) {
  if (topology_->maxRanksPerHost() == 1) {
    hosts_ = HostTopology::oneRankPerHost(wire_->size());
  } else {
    shareMemory(program, deadline);
  }
}

void CpuConnections::shareMemory(const ProgramFingerprint& program, Deadline deadline) {
  const auto wants = flagsOfAll(config::usesSharedMemory(), deadline);
  const auto& local = topology_->ranksOf(topology_->hostOf(wire_->rank()));
  const bool isWanted = local.size() > 1 && std::ranges::all_of(local, [&](int r) { return wants[r]; });
  std::string whyNot;
  if (isWanted) {
    auto made = SharedMemoryExchange::make(*wire_, local, deadline, whyNot);
    if (made) made->setProgram(program);
    const std::lock_guard<std::mutex> lock(mutex_);
    sharedMemory_ = std::move(made);
  }
  if (isWanted && !sharedMemory_) {
    LOG(WARNING) << "bagua: rank " << wire_->rank() << " exchanges CPU tensors with the ranks of its own host through "
                 << "the network, because there is no shared memory for them"
                 << (whyNot.empty() ? "" : " (" + whyNot + ")") << ": is /dev/shm too small?";
  }
  const auto shares = flagsOfAll(sharedMemory_ != nullptr, deadline);
  std::vector<std::string> ids;
  for (int peer = 0; peer < wire_->size(); ++peer) {
    ids.push_back(shares[peer] ? "host " + std::to_string(topology_->hostOf(peer)) : "rank " + std::to_string(peer));
  }
  hosts_.emplace(ids);
}

std::vector<bool> CpuConnections::flagsOfAll(bool flag, Deadline deadline) {
  std::vector<int> everybody(wire_->size());
  std::iota(everybody.begin(), everybody.end(), 0);
  const auto exchange = [&](const Wire::Exchanges& exchanges, const Pipeline& pipeline,
                            const Wire::Exchanges& forwarded) {
    wire_->exchangeInPieces(exchanges, pipeline, forwarded, deadline);
  };
  at::Tensor flags = at::zeros({wire_->size()}, at::kByte);
  flags.mutable_data_ptr<uint8_t>()[wire_->rank()] = flag ? 1 : 0;
  PartOwners(std::move(everybody), wire_->rank(), wire_->size(), exchange).gather(flags, {});
  const auto* const begin = flags.const_data_ptr<uint8_t>();
  // Not in braces: two pointers would be two flags.
  return std::vector<bool>(begin, begin + wire_->size());
}

int CpuConnections::partnerOn(int host, int rank) const {
  const auto& ranks = hosts_->ranksOf(host);
  return ranks[hosts_->localRank(rank) % static_cast<int>(ranks.size())];
}

void CpuConnections::exchangeInHost(const RankParts& parts, Deadline deadline) {
  std::vector<at::Tensor> received;
  std::vector<at::Tensor> sent;
  for (const int member : members()) {
    received.push_back(parts.received[member]);
    sent.push_back(parts.sent[member]);
  }
  sharedMemory_->allToAll(received, sent, deadline);
}

void CpuConnections::abort() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (sharedMemory_) sharedMemory_->abort();
  }
  wire_->abort();
}

}  // namespace bagua
