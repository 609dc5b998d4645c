// SPDX-License-Identifier: Apache-2.0
#include "backend/topology/host_lanes.h"

namespace bagua {

HostLanes::HostLanes(const HostTopology& topology, int rank, int64_t length)
    : topology_(topology),
      rank_(rank),
      length_(length),
      lanes_(topology.maxRanksPerHost()),
      laneLength_((length + lanes_ - 1) / lanes_) {}

int HostLanes::owner(int host, int lane) const {
  const auto& ranks = topology_.ranksOf(host);
  return ranks[static_cast<size_t>(lane) * ranks.size() / lanes_];
}

std::vector<int> HostLanes::owners(int lane) const {
  std::vector<int> ranks;
  for (int host = 0; host < hostCount(); ++host) ranks.push_back(owner(host, lane));
  return ranks;
}

int HostLanes::firstLane(int rank) const {
  // The smallest lane whose owner index, lane * ranks / lanes rounded down, is this rank's.
  const int ranks = static_cast<int>(topology_.ranksOf(topology_.hostOf(rank)).size());
  return (topology_.localRank(rank) * lanes_ + ranks - 1) / ranks;
}

int HostLanes::endLane(int rank) const {
  const int ranks = static_cast<int>(topology_.ranksOf(topology_.hostOf(rank)).size());
  return ((topology_.localRank(rank) + 1) * lanes_ + ranks - 1) / ranks;
}

int HostLanes::localSize() const { return static_cast<int>(topology_.ranksOf(ownHost()).size()); }

Communicator::Splits HostLanes::partsInHost() const {
  Communicator::Splits parts;
  for (const int peer : topology_.ranksOf(ownHost())) parts.push_back(ownLength(peer));
  return parts;
}

}  // namespace bagua
