// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "backend/cpu/collectives/cpu_communicator.h"
#include "backend/cpu/collectives/equal_parts.h"
#include "backend/cpu/collectives/reduction.h"
#include "backend/operation/tensor_bytes.h"

namespace bagua {
namespace {

// From this size on a broadcast to more than two hosts sends each a part, which they forward to each other.
constexpr int64_t kScatteredBroadcastBytes = int64_t{256} << 10;

}  // namespace

void CpuCommunicator::broadcast(at::Tensor& tensor, int root) {
  if (size() == 1) return;
  if (tensor.numel() == 0) return moveNothing();
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

void PartOwners::broadcastFrom(int host, at::Tensor& bytes, const AgreedLine& agreed) const {
  if (count() > 2 && bytes.numel() >= kScatteredBroadcastBytes) return broadcastInParts(host, bytes);
  broadcastWhole(host, bytes, count() <= reduction::kMostInOrder ? 1 : agreed.roundsFor(halves_));
}

// From the outermost round to the innermost: one owner of each part hears it, and tells the others.
void PartOwners::broadcastWhole(int host, at::Tensor& bytes, int rounds) const {
  for (const auto& [hub, peers, spoke, ownPart] : turnsAround(host, rounds)) {
    if (ownHost_ == hub) {
      Wire::Exchanges exchanges;
      for (const int part : peers.otherParts())
        exchanges.push_back({ranks_[peers.heard[part]], bytes, Wire::nothing()});
      exchange(exchanges);
    } else if (ownHost_ == spoke) {
      exchange({{ranks_[hub], Wire::nothing(), bytes}});
    }
  }
}

void PartOwners::broadcastInParts(int host, at::Tensor& bytes) const {
  const bool isRoot = host == ownHost_;
  const EqualParts parts(bytes, count());
  Wire::Exchanges scatter;
  for (int to = 0; to < count(); ++to) {
    if (isRoot && to != ownHost_) scatter.push_back({ranks_[to], parts[to], Wire::nothing()});
  }
  if (!isRoot) scatter.push_back({ranks_[host], Wire::nothing(), parts[ownHost_]});
  exchange(scatter);
  Wire::Exchanges gather;
  for (const int other : others()) {
    // The root has everything, and its own part is still to be had.
    if (other == host) {
      gather.push_back({ranks_[host], Wire::nothing(), parts[other]});
    } else {
      gather.push_back({ranks_[other], parts[ownHost_], isRoot ? Wire::nothing() : parts[other]});
    }
  }
  exchange(gather);
}

}  // namespace bagua
