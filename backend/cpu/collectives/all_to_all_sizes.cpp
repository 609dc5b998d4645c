// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/collectives/all_to_all_sizes.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "backend/config.h"
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

// Every rank tells every other its pair. First in the host: when its members have met there, each of them has compared
// its program with some of the other hosts, so that all ranks are in this one. Returns who has been heard.
std::vector<int> tellSizes(CpuConnections& connections, int root, const SizeTable& own, const SizeTable& theirs,
                           CpuConnections::Deadline deadline) {
  auto& wire = connections.wire();
  const bool hasMemory = connections.sharedMemory() != nullptr;
  std::vector<int> heard;
  Wire::Exchanges exchanges;
  for (int step = 1; step < wire.size(); ++step) {
    const int peer = (wire.rank() + step) % wire.size();
    if (hasMemory && connections.hosts().hostOf(peer) == connections.ownHost()) {
      heard.push_back(peer);
    } else if (!wire.checksExchanges() && config::checksPrograms() &&
               (root < 0 || root == peer || root == wire.rank())) {
      heard.push_back(peer);
      exchanges.push_back({peer, own.pairs()[peer], theirs.pairs()[peer]});
    }
  }
  if (hasMemory) connections.exchangeInHost({.received = theirs.pairs(), .sent = own.pairs()}, deadline);
  wire.exchange(exchanges, deadline);
  return heard;
}

}  // namespace

void checkAllToAllSizes(CpuConnections& connections, const ProgramFingerprint& program, const RankParts& parts,
                        int64_t item, bool isRefused, CpuConnections::Deadline deadline) {
  const int rank = connections.wire().rank();
  const int size = connections.wire().size();
  const SizeTable own(size);
  const SizeTable theirs(size);
  for (int peer = 0; peer < size; ++peer) {
    own.sent(peer) = isRefused ? kRefused : parts.sent[peer].numel();
    own.expected(peer) = parts.received[peer].numel();
  }
  const auto check = [&](int sender, int64_t sent, int receiver, int64_t expected) {
    if (sent == expected) return;
    BAGUA_THROW(MismatchError, "the ranks do not make the same exchange: rank ", sender, " sends ", sent / item,
                " elements to rank ", receiver, ", which expects ", expected / item,
                ". Nothing was exchanged between them. The sizes that a rank sends have to be those that the others "
                "expect of it");
  };
  // The pair that has come from a peer is about this rank, and lies where the one for the peer did.
  const auto heard = tellSizes(connections, program.peer, own, theirs, deadline);
  // All have met, and all have heard it.
  const auto refusing =
      std::find_if(heard.begin(), heard.end(), [&](int peer) { return theirs.sent(peer) == kRefused; });
  if (isRefused || refusing != heard.end()) {
    const int first = isRefused ? rank : *refusing;
    // The other hosts hear of it in the place of the exchange.
    if (connections.wire().checksExchanges() && !connections.isOneHost()) return connections.wire().refuse(first);
    throwRefused(first);
  }
  for (const int peer : heard) {
    check(rank, own.sent(peer), peer, theirs.expected(peer));
    check(peer, theirs.sent(peer), rank, own.expected(peer));
  }
}

}  // namespace bagua
