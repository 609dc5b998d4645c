// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>

#include <vector>

#include "backend/cpu/collectives/cpu_communicator.h"
#include "backend/operation/peer_errors.h"
#include "backend/operation/tensor_bytes.h"

namespace bagua {
namespace {

// For every rank, how many bytes another one sends to it and how many it expects of it. A pair travels to its rank.
class SizeTable {
 public:
  explicit SizeTable(int ranks)
      : table_(at::empty({2 * static_cast<int64_t>(ranks)}, at::kLong)),
        pairs_(bytesOfParts(table_, {}, ranks)),
        sizes_(table_.mutable_data_ptr<int64_t>()) {}

  [[nodiscard]] int64_t& sent(int rank) const { return sizes_[2 * static_cast<int64_t>(rank)]; }
  [[nodiscard]] int64_t& expected(int rank) const { return sizes_[2 * static_cast<int64_t>(rank) + 1]; }
  // As bytes.
  [[nodiscard]] const std::vector<at::Tensor>& pairs() const { return pairs_; }

 private:
  const at::Tensor table_;
  const std::vector<at::Tensor> pairs_;
  int64_t* const sizes_;
};

// On all ranks, ahead of an all-to-all whose sizes only its two ends know. Throws a MismatchError if a rank of this
// host is to get from this one, or this one from it, another number of bytes than it is sent; a RefusedError if one
// refuses its arguments, as `isRefused` says of this one. Between hosts the next exchange of the wire throws the same.
// `item`: bytes per element, for the message.
void checkAllToAllSizes(CpuConnections& connections, const RankParts& parts, int64_t item, bool isRefused,
                        CpuConnections::Deadline deadline) {
  const int rank = connections.wire().rank();
  const int size = connections.wire().size();
  int refusing = isRefused ? rank : -1;
  if (connections.sharedMemory() != nullptr) {
    const SizeTable own(size);
    const SizeTable theirs(size);
    for (int peer = 0; peer < size; ++peer) {
      own.sent(peer) = isRefused ? kRefused : parts.sent[peer].numel();
      own.expected(peer) = parts.received[peer].numel();
    }
    connections.exchangeInHost({.received = theirs.pairs(), .sent = own.pairs()}, deadline);
    // The pair that has come from a member is about this rank, and lies where the one for that member did.
    for (const int member : connections.members()) {
      if (refusing < 0 && theirs.sent(member) == kRefused) refusing = member;
    }
    for (const int member : connections.members()) {
      if (refusing >= 0 || member == rank) continue;
      checkSameSize(rank, own.sent(member), member, theirs.expected(member), item);
      checkSameSize(member, theirs.sent(member), rank, own.expected(member), item);
    }
  }
  if (refusing < 0) return;
  // The other hosts hear of it in the place of the exchange.
  if (!connections.isOneHost()) return connections.wire().refuse(refusing);
  throwRefused(refusing);
}

}  // namespace

void CpuCommunicator::allToAll(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                               const Splits& inputSplits) {
  connect();
  const bool isRefused = !inputSplits.empty() && inputSplits.front() == kRefused;
  const RankParts parts{.received = bytesOfParts(output, outputSplits, size()),
                        .sent = bytesOfParts(input, isRefused ? Splits(size(), 0) : inputSplits, size())};
  const bool hasOwnSizes = program().commonNumel == Operation::kAnyNumel;
  if (hasOwnSizes) {
    connections_.wire().compareAgain();
    checkAllToAllSizes(connections_, parts, itemSize(input), isRefused, deadline());
  }
  const int root = program().peer;
  Exchanges exchanges;
  for (int step = 0; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    if (hosts().hostOf(peer) == connections_.ownHost() && sharedMemory()) continue;
    const bool isEmpty = parts.sent[peer].numel() == 0 && parts.received[peer].numel() == 0;
    // Two ranks that have nothing for each other by their own account compare that too.
    const bool isCompared = hasOwnSizes && (root < 0 || root == peer || root == rank());
    if (!isEmpty || isCompared) exchanges.push_back({peer, parts.sent[peer], parts.received[peer]});
  }
  exchange(exchanges);
  if (!sharedMemory()) return;
  for (const int member : connections_.members()) {
    if (member != rank()) countShown(parts.sent[member].numel());
  }
  // Not skipped when this rank has nothing to send or receive: the others may have.
  connections_.exchangeInHost(parts, deadline());
}

void CpuCommunicator::allToAllInPieces(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                                       const Splits& inputSplits, const Pipeline& pipeline) {
  if (size() == 1) return Communicator::allToAllInPieces(output, input, outputSplits, inputSplits, pipeline);
  connect();
  const auto sent = bytesOfParts(input, inputSplits, size());
  const auto received = bytesOfParts(output, outputSplits, size());
  for (const int member : connections_.members()) {
    // All of them or none have parts for each other.
    if (member != rank() && (sent[member].numel() > 0 || received[member].numel() > 0)) {
      return Communicator::allToAllInPieces(output, input, outputSplits, inputSplits, pipeline);
    }
  }
  Exchanges exchanges;
  for (int step = 1; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    exchanges.push_back({.peer = peer, .sent = sent[peer], .received = received[peer], .isKept = true});
  }
  exchange(exchanges, pipeline);
}

}  // namespace bagua
