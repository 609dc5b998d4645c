// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/collectives/part_owners.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include "backend/cpu/collectives/reduction.h"
#include "backend/net/frame.h"
#include "backend/operation/tensor_bytes.h"
#include "backend/os/scratch_memory.h"

namespace bagua {
namespace {

// Bounds the scratch memory of a reduction (one bucket can be the whole model in the first iteration of DDP). What is
// on its way fits in: at 1 Gbit/s and 50 ms that is 6 MB, at 5 Gbit/s 31.
constexpr int64_t kScratchBytes = int64_t{32} << 20;
// From this size on a broadcast to more than two hosts sends each a part, which they forward to each other.
constexpr int64_t kScatteredBroadcastBytes = int64_t{256} << 10;
// A sleep lasts some 50 us longer than it is told to.
constexpr std::chrono::milliseconds kWorthSleeping{1};

bool isNarrow(const at::Tensor& flat) { return flat.scalar_type() == at::kHalf || flat.scalar_type() == at::kBFloat16; }
// 16-bit floats as those in which they are accumulated; everything else as it is.
at::Tensor widened(const at::Tensor& flat) { return isNarrow(flat) ? scratchCopy(flat, at::kFloat) : flat; }
int64_t wideItemSize(const at::Tensor& flat) { return isNarrow(flat) ? int64_t{sizeof(float)} : itemSize(flat); }

}  // namespace

// Equal parts of a flat tensor, the last ones shorter or empty.
class PartOwners::Parts {
 public:
  Parts(const at::Tensor& flat, int count) : flat_(flat), length_((flat.numel() + count - 1) / count) {}

  [[nodiscard]] int64_t begin(int part) const { return std::min(part * length_, flat_.numel()); }
  [[nodiscard]] at::Tensor operator[](int part) const {
    return flat_.narrow(0, begin(part), begin(part + 1) - begin(part));
  }

 private:
  const at::Tensor& flat_;
  const int64_t length_;
};

// What comes from one of `count` ranks, in a part of the scratch memory that is filled again and again.
class Scratch {
 public:
  Scratch(int64_t bytes, int count)
      : memory_(scratchTensor({std::min(bytes, roomOf(count))}, at::kByte)), bytes_(bytes) {}

  [[nodiscard]] Wire::Exchange from(int peer, const at::Tensor& sent) const { return {peer, sent, memory_, bytes_}; }
  // Where byte `begin` of the message lies.
  [[nodiscard]] const void* at(int64_t begin) const {
    return static_cast<const uint8_t*>(memory_.const_data_ptr()) + begin % std::max<int64_t>(memory_.numel(), 1);
  }

 private:
  static int64_t roomOf(int count) {
    // What a peer sends unasked has to fit.
    constexpr auto kLeast = static_cast<int64_t>(net::kEagerBytes);
    return std::max(kScratchBytes / count / Wire::kPieceBytes * Wire::kPieceBytes, kLeast);
  }
  const at::Tensor memory_;
  const int64_t bytes_;
};

// What the owners tell each other of their lines, beside the data, in a call in which they are to agree.
class PartOwners::Proposals {
 public:
  // Empty: they are not.
  explicit Proposals(const std::optional<AgreedLine::Proposal>& own) : largest_(own) {}

  [[nodiscard]] const std::optional<AgreedLine::Proposal>& largest() const { return largest_; }
  // Along with `exchanges`, in their directions.
  void addTo(Wire::Exchanges& exchanges) {
    if (!largest_) return;
    const at::Tensor sent = bytesOf(at::tensor(at::ArrayRef<int64_t>(*largest_), at::kLong));
    for (size_t data = 0, count = exchanges.size(); data < count; ++data) {
      const auto& exchange = exchanges[data];
      exchanges.push_back({exchange.peer, exchange.sent.numel() > 0 ? sent : Wire::nothing(),
                           exchange.incomingBytes() > 0 ? heard_.emplace_back(at::empty_like(sent)) : Wire::nothing()});
    }
  }
  // Between all owners, whatever else they exchange.
  void addToAll(const std::vector<int>& peers, Wire::Exchanges& exchanges) {
    if (!largest_) return;
    const at::Tensor sent = bytesOf(at::tensor(at::ArrayRef<int64_t>(*largest_), at::kLong));
    for (const int peer : peers) exchanges.push_back({peer, sent, heard_.emplace_back(at::empty_like(sent))});
  }
  void takeHeard() {
    for (const auto& heard : heard_) {
      AgreedLine::Proposal theirs;
      std::memcpy(theirs.data(), heard.const_data_ptr(), sizeof(theirs));
      std::transform(theirs.begin(), theirs.end(), largest_->begin(), largest_->begin(),
                     [](int64_t a, int64_t b) { return std::max(a, b); });
    }
    heard_.clear();
  }

 private:
  std::optional<AgreedLine::Proposal> largest_;
  std::vector<at::Tensor> heard_;
};

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

// Between two ranks, both reduce everything: that sends as many bytes as if each reduced a half and sent the result,
// and takes one one-way delay instead of two.
void PartOwners::allReduce(at::Tensor& flat, const ReduceOp& op, AgreedLine& agreed, const LineTo& lineTo) const {
  if (flat.numel() == 0) return;
  const auto bytes = static_cast<int64_t>(flat.nbytes());
  const bool isDivisible = count() > 2 && flat.numel() >= count();
  const auto way = agreed.wayToReduce(halves_, bytes, flat.numel() * wideItemSize(flat), isDivisible);
  reduceAndAgree(way, agreed, lineTo, [&](Proposals& proposals) {
    if (!way.isInParts) return allReduceInRounds(flat, op, way.rounds, proposals);
    way.rounds == 1 ? allReduceInParts(flat, op, proposals) : allReducePartsInRounds(flat, op, way.rounds, proposals);
  });
}

void PartOwners::reduceAndAgree(const AgreedLine::Way& way, AgreedLine& agreed, const LineTo& lineTo,
                                const std::function<void(Proposals&)>& reduce) const {
  const bool isDue = count() > 2 && agreed.isDue();
  Proposals proposals(isDue ? std::optional(AgreedLine::proposalOf(linesOf(way, lineTo))) : std::nullopt);
  reduce(proposals);
  if (isDue) agreed.agree(*proposals.largest());
  agreed.afterCall();
}

void PartOwners::meet(AgreedLine& agreed, const LineTo& lineTo, Wire::Deadline deadline) const {
  const auto begin = std::chrono::steady_clock::now();
  at::Tensor byte = at::zeros({1}, at::kByte);
  const int rounds = agreed.roundsFor(halves_);
  const AgreedLine::Way way{.rounds = rounds};
  reduceAndAgree(way, agreed, lineTo,
                 [&](Proposals& proposals) { allReduceInRounds(byte, ReduceOp::MAX, rounds, proposals); });
  std::chrono::microseconds delay{0};
  for (const auto& line : linesOf(way, lineTo)) delay = std::max(delay, line.delay);
  if (rounds * delay < kWorthSleeping) return;
  std::this_thread::sleep_until(std::min(begin + rounds * delay, deadline));
}

PartOwners::Reduction PartOwners::reductionInto(const at::Tensor& flat, const ReduceOp& op,
                                                const std::vector<int>& peers, int own, int64_t incoming,
                                                Reduce reduce) const {
  const auto sources = static_cast<int>(std::count_if(peers.begin(), peers.end(), [](int peer) { return peer >= 0; }));
  Reduction reduction;
  for (const int peer : peers) {
    reduction.scratch.push_back(peer < 0 ? nullptr : std::make_shared<Scratch>(incoming, sources));
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

void PartOwners::allReduceInRounds(at::Tensor& flat, const ReduceOp& op, int rounds, Proposals& proposals) const {
  if (count() <= reduction::kMostInOrder) return allReduceInOrder(flat, op, proposals);
  const auto peersOfAll = peersOfRounds(rounds);
  // What is left of 16-bit floats between rounds is not rounded.
  at::Tensor values = rounds > 1 ? widened(flat) : flat;
  for (int round = 0; round < rounds; ++round) {
    // The mean is taken of all, at the end.
    const bool isLast = round + 1 == rounds;
    takeRound(values, op == ReduceOp::AVG && !isLast ? ReduceOp(ReduceOp::SUM) : op, peersOfAll[round], proposals);
  }
  if (!values.is_same(flat)) flat.copy_(values);
}

void PartOwners::takeRound(at::Tensor& flat, const ReduceOp& op, const Halves::Peers& peers,
                           Proposals& proposals) const {
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
  exchange(exchanges, {.beforeSending = {}, .afterReceiving = reduction.step});
  proposals.takeHeard();
}

void PartOwners::allReduceInOrder(at::Tensor& flat, const ReduceOp& op, Proposals& proposals) const {
  const at::Tensor sent = bytesOf(flat);
  const auto reduction = reductionOfAll(flat, op, sent.numel());
  Wire::Exchanges exchanges;
  for (const int host : others()) exchanges.push_back(reduction.scratch[host]->from(ranks_[host], sent));
  proposals.addTo(exchanges);
  exchange(exchanges, {.beforeSending = {}, .afterReceiving = reduction.step});
  proposals.takeHeard();
}

void PartOwners::allReduceInParts(at::Tensor& flat, const ReduceOp& op, Proposals& proposals) const {
  const Parts parts(flat, count());
  const at::Tensor ownPart = parts[ownHost_];
  const auto reduction = reductionOfAll(ownPart, op, ownPart.numel() * itemSize(flat));
  // What has been reduced goes where the others' own was.
  Wire::Exchanges exchanges;
  Wire::Exchanges reduced;
  std::vector<int> peers;
  for (const int host : others()) {
    peers.push_back(ranks_[host]);
    exchanges.push_back(reduction.scratch[host]->from(ranks_[host], bytesOf(parts[host])));
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

void PartOwners::reducePart(const Parts& parts, const ReduceOp& op, const Halves::Peers& peers,
                            Proposals& proposals) const {
  const at::Tensor own = parts[peers.ownPart];
  const auto reduction =
      reductionInto(own, op, peers.heard, peers.ownPart, static_cast<int64_t>(own.nbytes()), &reduction::reduceHalves);
  Wire::Exchanges exchanges;
  std::vector<int> ranks;
  for (const int part : peers.otherParts()) {
    ranks.push_back(ranks_[peers.heard[part]]);
    exchanges.push_back(reduction.scratch[part]->from(ranks.back(), bytesOf(parts[part])));
  }
  proposals.addToAll(ranks, exchanges);
  exchange(exchanges, {.beforeSending = {}, .afterReceiving = reduction.step});
  proposals.takeHeard();
}

// Each round reduces a smaller part, of which the next one goes on with a part again; then all go back by the same way.
// As many as a power of two share the parts evenly, however they are halved; the rest go through one of those.
void PartOwners::allReducePartsInRounds(at::Tensor& flat, const ReduceOp& op, int rounds, Proposals& proposals) const {
  const auto pair = ownPair();
  const bool isFirst = ownHost_ == pair.first;
  const ReduceOp sum = op == ReduceOp::AVG ? ReduceOp(ReduceOp::SUM) : op;
  at::Tensor values = widened(flat);
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
    exchange(exchanges, {.beforeSending = {}, .afterReceiving = reduction.step});
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
    const Parts parts(whole, static_cast<int>(peers.heard.size()));
    reducePart(parts, isLast ? op : sum, peers, proposals);
    begin += parts.begin(peers.ownPart);
    length = parts[peers.ownPart].numel();
  }
  if (isFirst && !values.is_same(flat)) flat.narrow(0, begin, length).copy_(values.narrow(0, begin, length));
  for (size_t round = peersOfAll.size(); round > 0; --round) {
    const auto& peers = peersOfAll[round - 1];
    const Parts parts(wholes[round - 1], static_cast<int>(peers.heard.size()));
    Wire::Exchanges exchanges;
    for (const int part : peers.otherParts()) {
      exchanges.push_back({ranks_[peers.heard[part]], bytesOf(parts[peers.ownPart]), bytesOf(parts[part])});
    }
    exchange(exchanges);
  }
  fold(flat, /*isBack=*/true);
}

void PartOwners::reduceTo(int host, at::Tensor& flat, const ReduceOp& op, const AgreedLine& agreed) const {
  if (count() > reduction::kMostInOrder) {
    const auto bytes = static_cast<int64_t>(flat.nbytes());
    const auto way = agreed.wayToReduce(halves_, bytes, flat.numel() * wideItemSize(flat), /*isDivisible=*/false);
    return reduceInRounds(host, flat, op, way.rounds);
  }
  const at::Tensor sent = bytesOf(flat);
  if (host != ownHost_) return exchange({{ranks_[host], sent, Wire::nothing()}});
  const auto reduction = reductionOfAll(flat, op, sent.numel());
  Wire::Exchanges exchanges;
  for (int from = 0; from < count(); ++from) {
    if (from != ownHost_) exchanges.push_back(reduction.scratch[from]->from(ranks_[from], Wire::nothing()));
  }
  exchange(exchanges, {.beforeSending = {}, .afterReceiving = reduction.step});
}

std::vector<PartOwners::Turn> PartOwners::turnsAround(int host, int rounds) const {
  auto levelsOfRounds = halves_.levelsOfRounds(rounds);
  std::reverse(levelsOfRounds.begin(), levelsOfRounds.end());
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

// From the innermost round to the outermost: who has what a part has hands it to the one that is to have its range's.
void PartOwners::reduceInRounds(int host, at::Tensor& flat, const ReduceOp& op, int rounds) const {
  const auto turns = turnsAround(host, rounds);
  at::Tensor values = rounds > 1 ? widened(flat) : flat;
  const at::Tensor bytes = bytesOf(values);
  for (auto turn = turns.rbegin(); turn != turns.rend(); ++turn) {
    const auto& [hub, peers, spoke, ownPart] = *turn;
    if (ownHost_ == hub) {
      // The mean is taken of all, at the end.
      const bool isLast = std::next(turn) == turns.rend();
      const ReduceOp step = op == ReduceOp::AVG && !isLast ? ReduceOp(ReduceOp::SUM) : op;
      const auto reduction =
          reductionInto(values, step, peers.heard, peers.ownPart, bytes.numel(), &reduction::reduceHalves);
      Wire::Exchanges exchanges;
      for (const int part : peers.otherParts()) {
        exchanges.push_back(reduction.scratch[part]->from(ranks_[peers.heard[part]], Wire::nothing()));
      }
      exchange(exchanges, {.beforeSending = {}, .afterReceiving = reduction.step});
    } else if (ownHost_ == spoke) {
      exchange({{ranks_[hub], bytes, Wire::nothing()}});
    }
  }
  if (ownHost_ == host && !values.is_same(flat)) flat.copy_(values);
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

void PartOwners::broadcastInParts(int host, at::Tensor& bytes) const {
  const bool isRoot = host == ownHost_;
  const Parts parts(bytes, count());
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
