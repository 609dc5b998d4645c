// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/collectives/all_to_all_sizes.h"

#include <ATen/ops/empty.h>

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

}  // namespace

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

}  // namespace bagua
