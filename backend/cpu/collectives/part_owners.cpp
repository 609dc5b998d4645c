// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/collectives/part_owners.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "backend/cpu/collectives/reduction.h"
#include "backend/cpu/collectives/refilled_memory.h"
#include "backend/operation/tensor_bytes.h"

namespace bagua {

PartOwners::PartOwners(std::vector<int> ranks, int ownHost, int64_t contributors, ExchangeInPieces exchange)
    : ranks_(std::move(ranks)),
      ownHost_(ownHost),
      halves_(count()),
      contributors_(contributors),
      exchange_(std::move(exchange)) {}

std::vector<int> PartOwners::others() const {
  std::vector<int> hosts;
  for (int step = 1; step < count(); ++step) hosts.push_back((ownHost_ + step) % count());
  return hosts;
}

std::vector<Halves::Peers> PartOwners::peersOfRounds(int rounds) const {
  std::vector<Halves::Peers> peers;
  int level = halves_.levels();
  for (const int levels : halves_.levelsOfRounds(rounds)) {
    peers.push_back(halves_.peersOf(ownHost_, level, levels));
    level -= levels;
  }
  return peers;
}

std::vector<PartOwners::Turn> PartOwners::turnsAround(int host, int rounds) const {
  auto levelsOfRounds = halves_.levelsOfRounds(rounds);
  std::ranges::reverse(levelsOfRounds);
  std::vector<Turn> turns;
  int level = 0;
  for (const int levels : levelsOfRounds) {
    level += levels;
    auto peers = halves_.peersOf(host, level, levels);
    const int ownPart = halves_.slotOf(ownHost_, level) % static_cast<int>(peers.heard.size());
    const int spoke = ownPart == peers.ownPart ? host : peers.heard[ownPart];
    turns.push_back({.hub = host, .peers = std::move(peers), .spoke = spoke, .ownPart = ownPart});
    host = spoke;
  }
  return turns;
}

PartOwners::Reduction PartOwners::reductionInto(const at::Tensor& flat, const ReduceOp& op,
                                                const std::vector<int>& peers, int own, int64_t incoming,
                                                Reduce reduce) const {
  const auto sources = static_cast<int>(std::ranges::count_if(peers, [](int peer) { return peer >= 0; }));
  Reduction reduction;
  for (const int peer : peers) {
    reduction.scratch.push_back(peer < 0 ? nullptr : std::make_shared<RefilledMemory>(incoming, sources));
  }
  reduction.step = [contributors = contributors_, flat, op, own, reduce, scratch = reduction.scratch](
                       int64_t beginBytes, int64_t endBytes) {
    const int64_t item = itemSize(flat);
    const int64_t begin = beginBytes / item;
    const int64_t end = std::min(endBytes / item, flat.numel());
    if (begin >= end) return;
    std::vector<const void*> copies;
    for (const auto& theirs : scratch) copies.push_back(theirs ? theirs->at(begin * item) : nullptr);
    copies[own] = static_cast<const uint8_t*>(flat.const_data_ptr()) + begin * item;
    reduce(copies, op, contributors, flat.narrow(0, begin, end - begin));
  };
  return reduction;
}

PartOwners::Reduction PartOwners::reductionOfAll(const at::Tensor& flat, const ReduceOp& op, int64_t incoming) const {
  std::vector<int> hosts(count());
  std::iota(hosts.begin(), hosts.end(), 0);
  hosts[ownHost_] = -1;
  return reductionInto(flat, op, hosts, ownHost_, incoming, &reduction::reduceHosts);
}

}  // namespace bagua
