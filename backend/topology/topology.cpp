// SPDX-License-Identifier: Apache-2.0
#include "backend/topology/topology.h"

#include <c10/util/Exception.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <unordered_map>

#include "backend/config.h"

namespace bagua {
namespace {

std::string bootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  if (file >> id) return id;
  // No /proc (some sandboxes): the host name is the best that is left.
  std::array<char, 256> name{};
  TORCH_CHECK(gethostname(name.data(), name.size() - 1) == 0,
              "bagua: cannot identify this host (no boot id, no host name); set BAGUA_HOST_ID");
  return name.data();
}

std::string sharedMemoryIdentity() {
  struct stat status {};
  return stat("/dev/shm", &status) == 0 ? std::to_string(status.st_dev) : "none";
}

}  // namespace

HostTopology::HostTopology(const std::vector<std::string>& hostIds) {
  std::unordered_map<std::string, int> hosts;
  for (const auto& id : hostIds) {
    const int rank = static_cast<int>(hostOfRank_.size());
    const auto [entry, isNew] = hosts.emplace(id, static_cast<int>(hosts.size()));
    if (isNew) ranksOfHost_.emplace_back();
    auto& ranks = ranksOfHost_[entry->second];
    hostOfRank_.push_back(entry->second);
    localRank_.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(rank);
  }
}

HostTopology HostTopology::oneRankPerHost(int size) {
  std::vector<std::string> ids;
  ids.reserve(size);
  for (int rank = 0; rank < size; ++rank) ids.push_back(std::to_string(rank));
  return HostTopology(ids);
}

int HostTopology::maxRanksPerHost() const {
  size_t largest = 0;
  for (const auto& ranks : ranksOfHost_) largest = std::max(largest, ranks.size());
  return static_cast<int>(largest);
}

std::string localHostId() {
  if (auto id = config::hostId()) return *id;
  return bootId() + "/" + sharedMemoryIdentity();
}

}  // namespace bagua
