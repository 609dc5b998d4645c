// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bagua {

// Which ranks of a group share a host. Found, never assumed from rank order; hosts may hold different numbers of ranks.
// Immutable, the same on every rank.
class HostTopology {
 public:
  // `hostIds[r]` identifies the host of rank r: equal strings, same host.
  explicit HostTopology(const std::vector<std::string>& hostIds);

  // Every rank on a host of its own: the layout under which nothing is local.
  static HostTopology oneRankPerHost(int size);

  [[nodiscard]] int size() const { return static_cast<int>(hostOfRank_.size()); }
  [[nodiscard]] int hostCount() const { return static_cast<int>(ranksOfHost_.size()); }
  // Hosts are numbered in the order of their lowest rank.
  [[nodiscard]] int hostOf(int rank) const { return hostOfRank_.at(rank); }
  // Ascending.
  [[nodiscard]] const std::vector<int>& ranksOf(int host) const { return ranksOfHost_.at(host); }
  // Position of `rank` among the ranks of its host.
  [[nodiscard]] int localRank(int rank) const { return localRank_.at(rank); }
  // The largest number of ranks on one host.
  [[nodiscard]] int maxRanksPerHost() const;

 private:
  std::vector<int> hostOfRank_;
  std::vector<int> localRank_;
  std::vector<std::vector<int>> ranksOfHost_;
};

// What identifies this process's host to its peers: BAGUA_HOST_ID where set, else the kernel's boot id with the
// identity of the shared-memory file system, so that containers on one machine count as one host only if they share
// memory.
std::string localHostId();

}  // namespace bagua
