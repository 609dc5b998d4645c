// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <utility>

#include "backend/cpu/collectives/cpu_communicator.h"
#include "backend/cpu/collectives/equal_parts.h"
#include "backend/cpu/collectives/line_proposals.h"
#include "backend/cpu/collectives/reduction.h"
#include "backend/cpu/collectives/refilled_memory.h"
#include "backend/operation/tensor_bytes.h"

namespace bagua {

void CpuCommunicator::allReduce(at::Tensor& tensor, const ReduceOp& op) {
  if (tensor.numel() == 0) return moveNothing();
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

// Between two ranks that are far apart both reduce everything: that sends as many bytes as if each reduced a half and
// sent the result, and takes one one-way delay instead of two.
void PartOwners::allReduce(at::Tensor& flat, const ReduceOp& op, AgreedLine& agreed, const LineTo& lineTo) const {
  if (flat.numel() == 0) return;
  const auto bytes = static_cast<int64_t>(flat.nbytes());
  const bool isDivisible = flat.numel() >= count();
  const auto way = agreed.wayToReduce(halves_, bytes, flat.numel() * reduction::wideItemSize(flat), isDivisible);
  reduceAndAgree(way, agreed, lineTo, [&](LineProposals& proposals) {
    if (!way.isInParts) return allReduceInRounds(flat, op, way.rounds, proposals);
    way.rounds == 1 ? allReduceInParts(flat, op, proposals) : allReducePartsInRounds(flat, op, way.rounds, proposals);
  });
}

void PartOwners::reduceAndAgree(const AgreedLine::Way& way, AgreedLine& agreed, const LineTo& lineTo,
                                const std::function<void(LineProposals&)>& reduce) const {
  const bool isDue = agreed.isDue();
  LineProposals proposals(isDue ? std::optional(AgreedLine::proposalOf(linesOf(way, lineTo))) : std::nullopt);
  reduce(proposals);
  if (isDue) agreed.agree(*proposals.largest());
  agreed.afterCall();
}

std::vector<Wire::Line> PartOwners::linesOf(const AgreedLine::Way& way, const LineTo& lineTo) const {
  std::vector<int> hosts;
  if (way.rounds == 1) {
    hosts = others();
  } else {
    for (const auto& peers : way.isInParts ? peersOfPairs(way.rounds) : peersOfRounds(way.rounds)) {
      for (const int part : peers.otherParts()) hosts.push_back(peers.heard[part]);
    }
  }
  std::vector<Wire::Line> lines;
  for (const int host : hosts) lines.push_back(lineTo(ranks_[host]));
  return lines;
}

void PartOwners::allReduceInRounds(at::Tensor& flat, const ReduceOp& op, int rounds, LineProposals& proposals) const {
  if (count() <= reduction::kMostInOrder) return allReduceInOrder(flat, op, proposals);
  const auto peersOfAll = peersOfRounds(rounds);
  // What is left of 16-bit floats between rounds is not rounded.
  at::Tensor values = rounds > 1 ? reduction::widened(flat) : flat;
  for (int round = 0; round < rounds; ++round) {
    // The mean is taken of all, at the end.
    const bool isLast = round + 1 == rounds;
    takeRound(values, op == ReduceOp::AVG && !isLast ? ReduceOp(ReduceOp::SUM) : op, peersOfAll[round], proposals);
  }
  if (!values.is_same(flat)) flat.copy_(values);
}

void PartOwners::takeRound(at::Tensor& flat, const ReduceOp& op, const Halves::Peers& peers,
                           LineProposals& proposals) const {
  const at::Tensor sent = bytesOf(flat);
  const auto reduction = reductionInto(flat, op, peers.heard, peers.ownPart, sent.numel(), &reduction::reduceHalves);
  Wire::Exchanges exchanges;
  for (const int part : peers.otherParts()) {
    for (const auto& [peer, isTold, isHeard] : peers.ofPart(part)) {
      const at::Tensor said = isTold ? sent : Wire::nothing();
      exchanges.push_back(isHeard ? reduction.scratch[part]->from(ranks_[peer], said)
                                  : Wire::Exchange{ranks_[peer], said, Wire::nothing()});
    }
  }
  proposals.addTo(exchanges);
  exchangeAndReduce(exchanges, reduction);
  proposals.takeHeard();
}

void PartOwners::allReduceInOrder(at::Tensor& flat, const ReduceOp& op, LineProposals& proposals) const {
  const at::Tensor sent = bytesOf(flat);
  const auto reduction = reductionOfAll(flat, op, sent.numel());
  Wire::Exchanges exchanges;
  for (const int host : others()) exchanges.push_back(reduction.scratch[host]->from(ranks_[host], sent));
  proposals.addTo(exchanges);
  exchangeAndReduce(exchanges, reduction);
  proposals.takeHeard();
}

void PartOwners::allReduceInParts(at::Tensor& flat, const ReduceOp& op, LineProposals& proposals) const {
  const EqualParts parts(flat, count());
  const at::Tensor ownPart = parts[ownHost_];
  const auto reduction = reductionOfAll(ownPart, op, ownPart.numel() * itemSize(flat));
  // What has been reduced goes where the others' own was.
  Wire::Exchanges exchanges;
  Wire::Exchanges reduced;
  std::vector<int> peers;
  for (const int host : others()) {
    peers.push_back(ranks_[host]);
    exchanges.push_back(reduction.scratch[host]->from(ranks_[host], bytesOf(parts[host])));
    exchanges.back().isKept = true;
    reduced.push_back({ranks_[host], bytesOf(ownPart), bytesOf(parts[host])});
  }
  proposals.addToAll(peers, exchanges);
  exchange(exchanges, {.beforeSending = {}, .afterReceiving = reduction.step}, reduced);
  proposals.takeHeard();
}

PartOwners::Pair PartOwners::ownPair() const {
  const int level = halves_.ofPairs().levels();
  const int place = halves_.slotOf(ownHost_, level);
  const auto members = halves_.range(level, place);
  return {.place = place, .first = members.begin, .second = members.size() == 2 ? members.begin + 1 : -1};
}

std::vector<Halves::Peers> PartOwners::peersOfPairs(int rounds) const {
  const auto pair = ownPair();
  if (ownHost_ != pair.first) return {};
  const Halves pairs = halves_.ofPairs();
  std::vector<Halves::Peers> peersOfRounds;
  int level = pairs.levels();
  for (const int levels : pairs.levelsOfRounds(rounds)) {
    auto& peers = peersOfRounds.emplace_back(pairs.peersOf(pair.place, level, levels));
    for (int& heard : peers.heard) {
      if (heard >= 0) heard = halves_.range(pairs.levels(), heard).begin;
    }
    level -= levels;
  }
  return peersOfRounds;
}

void PartOwners::reducePart(const EqualParts& parts, const ReduceOp& op, const Halves::Peers& peers,
                            LineProposals& proposals) const {
  const at::Tensor own = parts[peers.ownPart];
  const auto reduction =
      reductionInto(own, op, peers.heard, peers.ownPart, static_cast<int64_t>(own.nbytes()), &reduction::reduceHalves);
  Wire::Exchanges exchanges;
  std::vector<int> ranks;
  for (const int part : peers.otherParts()) {
    ranks.push_back(ranks_[peers.heard[part]]);
    exchanges.push_back(reduction.scratch[part]->from(ranks.back(), bytesOf(parts[part])));
    exchanges.back().isKept = true;
  }
  proposals.addToAll(ranks, exchanges);
  exchangeAndReduce(exchanges, reduction);
  proposals.takeHeard();
}

// Each round reduces a smaller part, of which the next one goes on with a part again; then all go back by the same way.
// As many as a power of two share the parts evenly, however they are halved; the rest go through one of those.
void PartOwners::allReducePartsInRounds(at::Tensor& flat, const ReduceOp& op, int rounds,
                                        LineProposals& proposals) const {
  const auto pair = ownPair();
  const bool isFirst = ownHost_ == pair.first;
  const ReduceOp sum = op == ReduceOp::AVG ? ReduceOp(ReduceOp::SUM) : op;
  at::Tensor values = reduction::widened(flat);
  const auto fold = [&](at::Tensor& tensor, bool isBack) {
    if (pair.second < 0) return;
    const at::Tensor bytes = bytesOf(tensor);
    Wire::Exchanges exchanges;
    Reduction reduction;
    if (isFirst == isBack) {
      exchanges.push_back({ranks_[isFirst ? pair.second : pair.first], bytes, Wire::nothing()});
    } else if (isBack) {
      exchanges.push_back({ranks_[pair.first], Wire::nothing(), bytes});
    } else {
      reduction = reductionInto(tensor, sum, {-1, pair.second}, 0, bytes.numel(), &reduction::reduceHalves);
      exchanges.push_back(reduction.scratch[1]->from(ranks_[pair.second], Wire::nothing()));
    }
    proposals.addTo(exchanges);
    exchangeAndReduce(exchanges, reduction);
    proposals.takeHeard();
  };
  fold(values, /*isBack=*/false);
  const auto peersOfAll = peersOfPairs(rounds);
  // What there is to reduce in each round, a part of that of the round before.
  std::vector<at::Tensor> wholes;
  int64_t begin = 0;
  int64_t length = flat.numel();
  for (const auto& peers : peersOfAll) {
    wholes.push_back(flat.narrow(0, begin, length));
    const bool isLast = wholes.size() == peersOfAll.size();
    const at::Tensor whole = values.narrow(0, begin, length);
    const EqualParts parts(whole, static_cast<int>(peers.heard.size()));
    reducePart(parts, isLast ? op : sum, peers, proposals);
    begin += parts.begin(peers.ownPart);
    length = parts[peers.ownPart].numel();
  }
  if (isFirst && !values.is_same(flat)) flat.narrow(0, begin, length).copy_(values.narrow(0, begin, length));
  for (size_t round = peersOfAll.size(); round > 0; --round) {
    const auto& peers = peersOfAll[round - 1];
    const EqualParts parts(wholes[round - 1], static_cast<int>(peers.heard.size()));
    Wire::Exchanges exchanges;
    for (const int part : peers.otherParts()) {
      exchanges.push_back({ranks_[peers.heard[part]], bytesOf(parts[peers.ownPart]), bytesOf(parts[part])});
    }
    exchange(exchanges);
  }
  fold(flat, /*isBack=*/true);
}

}  // namespace bagua
