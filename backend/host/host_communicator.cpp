// SPDX-License-Identifier: Apache-2.0
#include "backend/host/host_communicator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "backend/config.h"
#include "backend/host/reduction.h"
#include "backend/peer_errors.h"
#include "backend/tensor_bytes.h"

namespace bagua {
namespace {

// Bounds the scratch memory of a reduction (one bucket can be the whole model in the first iteration of DDP).
constexpr int64_t kScratchBytes = int64_t{32} << 20;
// Up to this size one exchange of everything is faster than two of parts.
constexpr int64_t kSmallBytes = int64_t{16} << 10;
// From this size on a broadcast to more than two hosts sends each a part, which they pass on to each other.
constexpr int64_t kScatteredBroadcastBytes = int64_t{256} << 10;

int64_t itemSize(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.element_size()); }

const uint8_t* addressOf(const at::Tensor& tensor) { return static_cast<const uint8_t*>(tensor.const_data_ptr()); }

at::Tensor nothing() { return at::empty({0}, at::kByte); }

// Equal parts of a flat tensor, the last ones shorter or empty.
class Parts {
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

// The part of an all-to-all that goes to, or comes from, each rank; as bytes.
std::vector<at::Tensor> partsOf(const at::Tensor& tensor, const Communicator::Splits& splits, int size) {
  const at::Tensor bytes = bytesOf(tensor);
  const int64_t item = itemSize(tensor);
  std::vector<at::Tensor> parts;
  int64_t begin = 0;
  for (int peer = 0; peer < size; ++peer) {
    const int64_t length = (splits.empty() ? tensor.numel() / size : splits[peer]) * item;
    parts.push_back(bytes.narrow(0, begin, length));
    begin += length;
  }
  return parts;
}

int indexIn(const std::vector<int>& ranks, int rank) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

}  // namespace

HostCommunicator::HostCommunicator(std::unique_ptr<Wire> wire, std::shared_ptr<const HostTopology> topology)
    : Communicator(wire->rank(), wire->size(), std::move(topology)), wire_(std::move(wire)) {}

// --- Who shares memory with whom -------------------------------------------------------------------------------------

void HostCommunicator::connect() {
  if (!hosts_) {
    HostTopology alone = HostTopology::oneRankPerHost(size());
    if (topology().maxRanksPerHost() == 1) {
      hosts_ = std::move(alone);
    } else {
      shareMemory();
    }
  }
  if (!std::exchange(isCompared_, true)) comparePrograms();
}

// With a rank of every other host: the ranks of one host compare when they meet in its memory.
void HostCommunicator::comparePrograms() {
  if (isOneHost() || !config::checksPrograms()) return;
  static_assert(std::is_trivially_copyable_v<ProgramFingerprint>);
  constexpr auto kBytes = static_cast<int64_t>(sizeof(ProgramFingerprint));
  at::Tensor sent = at::empty({kBytes}, at::kByte);
  std::memcpy(sent.mutable_data_ptr(), &program(), kBytes);
  Exchanges exchanges;
  for (int step = 1; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    const bool isCounterpart = deputyOn(hosts_->hostOf(peer), rank()) == peer || deputyOn(ownHost(), peer) == rank();
    if (hosts_->hostOf(peer) != ownHost() && isCounterpart) {
      exchanges.push_back({peer, sent, at::empty({kBytes}, at::kByte)});
    }
  }
  wire_->swap(exchanges, deadline());
  for (const auto& exchange : exchanges) {
    ProgramFingerprint theirs;
    std::memcpy(&theirs, addressOf(exchange.received), kBytes);
    const bool isLower = rank() < exchange.peer;
    const auto nameOf = [](int rank) { return "rank " + std::to_string(rank); };
    checkSameProgram(isLower ? program() : theirs, nameOf(std::min(rank(), exchange.peer)),
                     isLower ? theirs : program(), nameOf(std::max(rank(), exchange.peer)));
  }
}

void HostCommunicator::shareMemory() {
  const auto wants = tellAll(config::usesSharedMemory());
  const auto& local = topology().ranksOf(topology().hostOf(rank()));
  const bool isWanted = local.size() > 1 && std::all_of(local.begin(), local.end(), [&](int r) { return wants[r]; });
  std::string whyNot;
  if (isWanted) {
    auto made = SharedMemoryExchange::make(*wire_, local, deadline(), whyNot);
    if (made) made->setProgram(program());
    const std::lock_guard<std::mutex> lock(mutex_);
    sharedMemory_ = std::move(made);
  }
  if (isWanted && !sharedMemory_) {
    LOG(WARNING) << "bagua: rank " << rank() << " exchanges CPU tensors with the ranks of its own host through the "
                 << "network, because there is no shared memory for them" << (whyNot.empty() ? "" : " (" + whyNot + ")")
                 << ": is /dev/shm too small?";
  }
  const auto shares = tellAll(sharedMemory_ != nullptr);
  std::vector<std::string> ids;
  for (int peer = 0; peer < size(); ++peer) {
    ids.push_back(shares[peer] ? "host " + std::to_string(topology().hostOf(peer)) : "rank " + std::to_string(peer));
  }
  hosts_.emplace(ids);
}

std::vector<bool> HostCommunicator::tellAll(bool flag) {
  const at::Tensor sent = at::full({1}, flag ? 1 : 0, at::kByte);
  Exchanges exchanges;
  for (int peer = 0; peer < size(); ++peer) exchanges.push_back({peer, sent, at::empty({1}, at::kByte)});
  wire_->swap(exchanges, deadline());
  std::vector<bool> flags;
  for (const auto& exchange : exchanges) flags.push_back(*addressOf(exchange.received) == 1);
  return flags;
}

int HostCommunicator::deputyOn(int host, int rank) const {
  const auto& ranks = hosts_->ranksOf(host);
  return ranks[hosts_->localRank(rank) % static_cast<int>(ranks.size())];
}

void HostCommunicator::swap(const Exchanges& exchanges, const Pipeline& pipeline, const Exchanges& passedOn) {
  for (const auto* const sent : {&exchanges, &passedOn}) {
    for (const auto& exchange : *sent) countSentTo(exchange.peer, exchange.sent.numel());
  }
  wire_->swapInPieces(exchanges, pipeline, passedOn, deadline());
}

// For the others of the host to read.
void HostCommunicator::countShown(int64_t bytes) { countSent({.inHostBytes = bytes, .betweenHostsBytes = 0}); }

// --- Steps -----------------------------------------------------------------------------------------------------------

void HostCommunicator::allReduceAmong(const Owners& owners, at::Tensor& flat, const ReduceOp& op) {
  const auto count = static_cast<int64_t>(owners.size());
  if (static_cast<int64_t>(flat.nbytes()) <= kSmallBytes || flat.numel() < count) {
    return allReduceWhole(owners, flat, op);
  }
  const int64_t most = kScratchBytes / itemSize(flat);
  for (int64_t begin = 0; begin < flat.numel(); begin += most) {
    at::Tensor piece = flat.narrow(0, begin, std::min(most, flat.numel() - begin));
    allReduceInParts(owners, piece, op);
  }
}

void HostCommunicator::allReduceWhole(const Owners& owners, at::Tensor& flat, const ReduceOp& op) {
  if (flat.numel() == 0) return;
  const at::Tensor sent = bytesOf(flat);
  Exchanges exchanges;
  std::vector<const void*> parts;
  for (const int owner : owners) {
    exchanges.push_back({owner, sent, at::empty_like(sent)});
    parts.push_back(addressOf(exchanges.back().received));
  }
  swap(exchanges);
  reduction::reduceParts(parts, op, size(), flat);
}

void HostCommunicator::allReduceInParts(const Owners& owners, at::Tensor& flat, const ReduceOp& op) {
  const auto count = static_cast<int>(owners.size());
  const int own = indexIn(owners, rank());
  const Parts parts(flat, count);
  const at::Tensor ownPart = parts[own];
  const int64_t item = itemSize(flat);

  // In turn, so that not all send to the same one first. What has been reduced goes where the others' own was.
  Exchanges exchanges;
  Exchanges reduced;
  std::vector<const void*> copies(count, ownPart.const_data_ptr());
  for (int step = 1; step < count; ++step) {
    const int index = (own + step) % count;
    exchanges.push_back({owners[index], bytesOf(parts[index]), at::empty({ownPart.numel() * item}, at::kByte)});
    copies[index] = exchanges.back().received.const_data_ptr();
    reduced.push_back({owners[index], bytesOf(ownPart), bytesOf(parts[index])});
  }
  const auto reduceArrived = [&](int64_t beginBytes, int64_t endBytes) {
    const int64_t begin = beginBytes / item;
    const int64_t end = std::min(endBytes / item, ownPart.numel());
    if (begin >= end) return;
    std::vector<const void*> arrived;
    for (const void* copy : copies) arrived.push_back(static_cast<const uint8_t*>(copy) + begin * item);
    reduction::reduceParts(arrived, op, size(), ownPart.narrow(0, begin, end - begin));
  };
  swap(exchanges, {.beforeSending = {}, .afterReceiving = reduceArrived}, reduced);
}

void HostCommunicator::reduceTo(int host, const Owners& owners, at::Tensor& flat, const ReduceOp& op) {
  const bool isReceiver = owners[host] == rank();
  const int64_t item = itemSize(flat);
  const int64_t most = kScratchBytes / item;
  for (int64_t begin = 0; begin < flat.numel(); begin += most) {
    const at::Tensor piece = flat.narrow(0, begin, std::min(most, flat.numel() - begin));
    if (!isReceiver) {
      swap({{owners[host], bytesOf(piece), nothing()}});
      continue;
    }
    Exchanges exchanges;
    std::vector<const void*> copies;
    for (const int owner : owners) {
      if (owner == rank()) {
        copies.push_back(piece.const_data_ptr());
      } else {
        exchanges.push_back({owner, nothing(), at::empty({piece.numel() * item}, at::kByte)});
        copies.push_back(exchanges.back().received.const_data_ptr());
      }
    }
    swap(exchanges);
    reduction::reduceParts(copies, op, size(), piece);
  }
}

void HostCommunicator::broadcastAmong(const Owners& owners, int root, at::Tensor& bytes) {
  const auto count = static_cast<int>(owners.size());
  const bool isRoot = rank() == root;
  if (count == 2 || bytes.numel() < kScatteredBroadcastBytes) {
    Exchanges exchanges;
    for (const int owner : owners) {
      if (isRoot && owner != root) exchanges.push_back({owner, bytes, nothing()});
    }
    if (!isRoot) exchanges.push_back({root, nothing(), bytes});
    return swap(exchanges);
  }
  const Parts parts(bytes, count);
  const int own = indexIn(owners, rank());
  Exchanges scatter;
  for (int index = 0; index < count; ++index) {
    if (isRoot && owners[index] != root) scatter.push_back({owners[index], parts[index], nothing()});
  }
  if (!isRoot) scatter.push_back({root, nothing(), parts[own]});
  swap(scatter);
  Exchanges gather;
  for (int step = 1; step < count; ++step) {
    const int index = (own + step) % count;
    // The root has everything, and its own part is still to be had.
    if (owners[index] == root) {
      gather.push_back({root, nothing(), parts[index]});
    } else {
      gather.push_back({owners[index], parts[own], isRoot ? nothing() : parts[index]});
    }
  }
  swap(gather);
}

std::vector<HostCommunicator::Span> HostCommunicator::spansOf(const HostLanes& lanes) const {
  std::vector<Span> spans;
  for (const int member : members()) spans.push_back({lanes.begin(lanes.firstLane(member)), lanes.ownLength(member)});
  return spans;
}

c10d::ReduceOp HostCommunicator::reduceInHost(at::Tensor& flat, const at::Tensor& prepared, const HostLanes& lanes,
                                              const ReduceOp& op) {
  if (lanes.count() == 1) {
    if (!prepared.is_same(flat)) flat.copy_(prepared);
    return op;
  }
  const auto steps = reduction::inTwoSteps(op, flat.scalar_type());
  if (sharedMemory_) {
    at::Tensor own = flat.narrow(0, lanes.begin(lanes.firstLane(rank())), lanes.ownLength(rank()));
    countShown((flat.numel() - own.numel()) * itemSize(flat));
    sharedMemory_->reduceSpans(own, prepared, spansOf(lanes), steps.first, size(), deadline());
  } else if (steps.first == ReduceOp::AVG || !prepared.is_same(flat)) {
    reduction::reduceParts({prepared.const_data_ptr()}, steps.first, size(), flat);
  }
  return steps.second;
}

void HostCommunicator::gatherInHost(at::Tensor& flat, const HostLanes& lanes) {
  if (!sharedMemory_) return;
  countShown(lanes.ownLength(rank()) * itemSize(flat) * (sharedMemory_->size() - 1));
  sharedMemory_->gather(flat, spansOf(lanes), deadline());
}

std::vector<std::vector<int>> HostCommunicator::partsOfMembers() const {
  std::vector<std::vector<int>> parts;
  for (const int member : members()) {
    auto& own = parts.emplace_back(1, member);
    for (int peer = 0; peer < size(); ++peer) {
      if (hosts_->hostOf(peer) != ownHost() && deputyOn(ownHost(), peer) == member) own.push_back(peer);
    }
  }
  return parts;
}

// --- Collectives -----------------------------------------------------------------------------------------------------

void HostCommunicator::broadcast(at::Tensor& tensor, int root) {
  if (size() == 1 || tensor.numel() == 0) return;
  connect();
  at::Tensor bytes = bytesOf(tensor);
  Owners leaders;
  for (int host = 0; host < hosts_->hostCount(); ++host) {
    leaders.push_back(host == hosts_->hostOf(root) ? root : hosts_->ranksOf(host).front());
  }
  const int leader = leaders[ownHost()];
  if (!isOneHost() && rank() == leader) broadcastAmong(leaders, root, bytes);
  if (!sharedMemory_) return;
  if (rank() == leader) countShown(bytes.numel() * (sharedMemory_->size() - 1));
  sharedMemory_->broadcast(bytes, indexIn(members(), leader), deadline());
}

void HostCommunicator::allReduce(at::Tensor& tensor, const ReduceOp& op) {
  if (tensor.numel() == 0) return;
  connect();
  at::Tensor flat = flatOf(tensor);
  const at::Tensor prepared = reduction::prepare(flat, op);
  if (isOneHost() && sharedMemory_) {
    countShown(2 * static_cast<int64_t>(flat.nbytes()) * (size() - 1) / size());
    return sharedMemory_->allReduce(flat, prepared, op, deadline());
  }
  const HostLanes lanes(*hosts_, rank(), flat.numel());
  const ReduceOp betweenHosts = reduceInHost(flat, prepared, lanes, op);
  for (int lane = lanes.firstLane(rank()); lane < lanes.endLane(rank()); ++lane) {
    at::Tensor own = flat.narrow(0, lanes.begin(lane), lanes.length(lane));
    allReduceAmong(lanes.owners(lane), own, betweenHosts);
  }
  gatherInHost(flat, lanes);
}

void HostCommunicator::reduce(at::Tensor& tensor, int root, const ReduceOp& op) {
  if (tensor.numel() == 0) return;
  connect();
  at::Tensor flat = flatOf(tensor);
  const at::Tensor prepared = reduction::prepare(flat, op);
  if (isOneHost() && sharedMemory_) {
    if (rank() != root) countShown(static_cast<int64_t>(flat.nbytes()));
    return sharedMemory_->reduce(flat, prepared, indexIn(members(), root), op, deadline());
  }
  const HostLanes lanes(*hosts_, rank(), flat.numel());
  // Only the root's own tensor may change.
  at::Tensor result = rank() == root ? flat : at::empty_like(flat);
  const ReduceOp betweenHosts = reduceInHost(result, prepared, lanes, op);
  const int host = hosts_->hostOf(root);
  for (int lane = lanes.firstLane(rank()); lane < lanes.endLane(rank()); ++lane) {
    at::Tensor own = result.narrow(0, lanes.begin(lane), lanes.length(lane));
    reduceTo(host, lanes.owners(lane), own, betweenHosts);
  }
  if (ownHost() == host) gatherInHost(result, lanes);
}

void HostCommunicator::allGather(at::Tensor& output, const at::Tensor& input) {
  if (input.numel() == 0) return;
  connect();
  at::Tensor all = bytesOf(output);
  const at::Tensor own = bytesOf(input);
  const int64_t bytes = own.numel();
  const auto partOf = [&](int peer) { return all.narrow(0, peer * bytes, bytes); };
  Exchanges exchanges{{rank(), own, partOf(rank())}};
  for (int step = 1; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    if (hosts_->hostOf(peer) == ownHost()) continue;
    const bool isSent = deputyOn(hosts_->hostOf(peer), rank()) == peer;
    const bool isReceived = deputyOn(ownHost(), peer) == rank();
    if (isSent || isReceived) {
      exchanges.push_back({peer, isSent ? own : nothing(), isReceived ? partOf(peer) : nothing()});
    }
  }
  swap(exchanges);
  if (!sharedMemory_) return;
  // The n-th part of every member at a time.
  const auto parts = partsOfMembers();
  size_t most = 0;
  for (const auto& ofMember : parts) most = std::max(most, ofMember.size());
  for (size_t turn = 0; turn < most; ++turn) {
    std::vector<Span> spans;
    for (const auto& ofMember : parts) {
      spans.push_back(turn < ofMember.size() ? Span{ofMember[turn] * bytes, bytes} : Span{});
    }
    sharedMemory_->gather(all, spans, deadline());
    countShown(spans[sharedMemory_->rank()].length * (sharedMemory_->size() - 1));
  }
}

void HostCommunicator::reducePartsInHost(std::vector<at::Tensor>& reduced, const at::Tensor& prepared,
                                         const std::vector<std::vector<int>>& parts, const ReduceOp& op) {
  const int64_t length = reduced.front().numel();
  size_t most = 0;
  for (const auto& ofMember : parts) most = std::max(most, ofMember.size());
  for (size_t turn = 0; turn < most; ++turn) {
    std::vector<Span> spans;
    int64_t shown = 0;
    for (const auto& ofMember : parts) {
      spans.push_back(turn < ofMember.size() ? Span{ofMember[turn] * length, length} : Span{});
      shown += spans.back().length;
    }
    shown -= spans[sharedMemory_->rank()].length;
    countShown(shown * itemSize(prepared));
    at::Tensor target = turn < reduced.size() ? reduced[turn] : reduced.front().narrow(0, 0, 0);
    sharedMemory_->reduceSpans(target, prepared, spans, op, size(), deadline());
  }
}

void HostCommunicator::reduceScatter(at::Tensor& output, const at::Tensor& input, const ReduceOp& op) {
  if (output.numel() == 0) return;
  connect();
  const at::Tensor prepared = reduction::prepare(flatOf(input), op);
  at::Tensor result = flatOf(output);
  const int64_t length = result.numel();
  const int64_t item = itemSize(result);
  const bool isHierarchical = hosts_->maxRanksPerHost() > 1;
  const auto steps =
      isHierarchical && !isOneHost() ? reduction::inTwoSteps(op, result.scalar_type()) : reduction::TwoSteps{op, op};
  // What this host has of the parts that this rank deals with, its own first.
  const auto parts = partsOfMembers();
  const auto& own = parts[hosts_->localRank(rank())];
  std::vector<at::Tensor> reduced;
  for (const int part : own) {
    const at::Tensor contribution = prepared.narrow(0, part * length, length);
    const bool isLeft = !sharedMemory_ && (!isHierarchical || steps.first != ReduceOp::AVG);
    reduced.push_back(isLeft ? contribution : at::empty_like(contribution));
    if (!sharedMemory_ && !isLeft) {
      reduction::reduceParts({contribution.const_data_ptr()}, steps.first, size(), reduced.back());
    }
  }
  if (sharedMemory_) reducePartsInHost(reduced, prepared, parts, steps.first);
  if (isOneHost() && sharedMemory_) {
    result.copy_(reduced.front());
    return;
  }
  Exchanges exchanges;
  for (size_t turn = 1; turn < own.size(); ++turn) exchanges.push_back({own[turn], bytesOf(reduced[turn]), nothing()});
  std::vector<const void*> copies;
  for (int host = 0; host < hosts_->hostCount(); ++host) {
    if (host == ownHost()) {
      copies.push_back(reduced.front().const_data_ptr());
    } else {
      exchanges.push_back({deputyOn(host, rank()), nothing(), at::empty({length * item}, at::kByte)});
      copies.push_back(exchanges.back().received.const_data_ptr());
    }
  }
  swap(exchanges);
  reduction::reduceParts(copies, steps.second, size(), result);
}

void HostCommunicator::exchangeInHost(const std::vector<at::Tensor>& received, const std::vector<at::Tensor>& sent) {
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  for (const int member : members()) {
    from.push_back(sent[member]);
    to.push_back(received[member]);
  }
  sharedMemory_->allToAll(to, from, deadline());
}

void HostCommunicator::swapInHost(const std::vector<at::Tensor>& received, const std::vector<at::Tensor>& sent) {
  for (const int member : members()) {
    if (member != rank()) countShown(sent[member].numel());
  }
  exchangeInHost(received, sent);
}

// Every rank tells every other what it sends to it and what it expects of it. First in the host: when its members have
// met there, each of them has compared its program with some of the other hosts, so that all ranks are in this one.
void HostCommunicator::checkParts(const std::vector<at::Tensor>& received, const std::vector<at::Tensor>& sent,
                                  int64_t item) {
  // Of every rank what is sent to it, and what is expected of it.
  const auto sentTo = [](int peer) { return 2 * static_cast<int64_t>(peer); };
  const auto receivedFrom = [](int peer) { return 2 * static_cast<int64_t>(peer) + 1; };
  const at::Tensor own = at::empty({sentTo(size())}, at::kLong);
  const at::Tensor theirs = at::empty_like(own);
  auto* const ownSizes = own.mutable_data_ptr<int64_t>();
  for (int peer = 0; peer < size(); ++peer) {
    ownSizes[sentTo(peer)] = sent[peer].numel();
    ownSizes[receivedFrom(peer)] = received[peer].numel();
  }
  const auto told = partsOf(own, {}, size());
  const auto heard = partsOf(theirs, {}, size());
  const int root = program().peer;
  Exchanges exchanges;
  std::vector<int> peers;
  for (int step = 1; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    if (sharedMemory_ && hosts_->hostOf(peer) == ownHost()) {
      peers.push_back(peer);
    } else if (config::checksPrograms() && (root < 0 || root == peer || root == rank())) {
      peers.push_back(peer);
      exchanges.push_back({peer, told[peer], heard[peer]});
    }
  }
  if (sharedMemory_) exchangeInHost(heard, told);
  wire_->swap(exchanges, deadline());
  const auto check = [&](int sender, int64_t isSent, int receiver, int64_t isExpected) {
    if (isSent == isExpected) return;
    BAGUA_THROW(MismatchError, "the ranks do not make the same exchange: rank ", sender, " sends ", isSent / item,
                " elements to rank ", receiver, ", which expects ", isExpected / item,
                ". Nothing was exchanged between them. The sizes that a rank sends have to be those that the others "
                "expect of it");
  };
  const auto* const theirSizes = theirs.const_data_ptr<int64_t>();
  for (const int peer : peers) {
    check(rank(), ownSizes[sentTo(peer)], peer, theirSizes[receivedFrom(peer)]);
    check(peer, theirSizes[sentTo(peer)], rank(), ownSizes[receivedFrom(peer)]);
  }
}

void HostCommunicator::allToAll(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                                const Splits& inputSplits) {
  connect();
  const auto sent = partsOf(input, inputSplits, size());
  const auto received = partsOf(output, outputSplits, size());
  if (program().commonNumel == Operation::kAnyNumel) checkParts(received, sent, itemSize(input));
  Exchanges exchanges;
  for (int step = 0; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    if (hosts_->hostOf(peer) != ownHost() || !sharedMemory_) exchanges.push_back({peer, sent[peer], received[peer]});
  }
  swap(exchanges);
  // Not skipped when this rank has nothing to send or receive: the others may have.
  if (sharedMemory_) swapInHost(received, sent);
}

void HostCommunicator::allGatherInPieces(at::Tensor& output, const at::Tensor& input, const Pipeline& pipeline) {
  if (size() == 1) return Communicator::allGatherInPieces(output, input, pipeline);
  connect();
  if (sharedMemory_ || hosts_->maxRanksPerHost() > 1) {
    return Communicator::allGatherInPieces(output, input, pipeline);
  }
  Exchanges exchanges;
  for (int step = 1; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    exchanges.push_back({peer, input, output.narrow(0, peer * input.numel(), input.numel())});
  }
  swap(exchanges, pipeline);
}

void HostCommunicator::allToAllInPieces(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                                        const Splits& inputSplits, const Pipeline& pipeline) {
  if (size() == 1) return Communicator::allToAllInPieces(output, input, outputSplits, inputSplits, pipeline);
  connect();
  const auto sent = partsOf(input, inputSplits, size());
  const auto received = partsOf(output, outputSplits, size());
  for (const int member : members()) {
    // All of them or none have parts for each other.
    if (member != rank() && (sent[member].numel() > 0 || received[member].numel() > 0)) {
      return Communicator::allToAllInPieces(output, input, outputSplits, inputSplits, pipeline);
    }
  }
  Exchanges exchanges;
  for (int step = 1; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    exchanges.push_back({peer, sent[peer], received[peer]});
  }
  swap(exchanges, pipeline);
}

void HostCommunicator::barrier() {
  if (size() == 1) return;
  connect();
  if (sharedMemory_) sharedMemory_->barrier(deadline());
  if (isOneHost()) return;
  if (rank() == members().front()) {
    const at::Tensor sent = at::empty({1}, at::kByte);
    Exchanges exchanges;
    for (int host = 0; host < hosts_->hostCount(); ++host) {
      if (host != ownHost()) exchanges.push_back({hosts_->ranksOf(host).front(), sent, at::empty({1}, at::kByte)});
    }
    wire_->swap(exchanges, deadline());
  }
  if (sharedMemory_) sharedMemory_->barrier(deadline());
}

void HostCommunicator::setProgram(const ProgramFingerprint& program) {
  Communicator::setProgram(program);
  isCompared_ = false;
  if (sharedMemory_) sharedMemory_->setProgram(program);
}

void HostCommunicator::abort() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (sharedMemory_) sharedMemory_->abort();
  }
  wire_->abort();
}

}  // namespace bagua
