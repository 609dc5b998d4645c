// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/slots.h"

#include <numeric>

namespace bagua::compressed {

int64_t chunkLength(const HostLanes& lanes) { return (lanes.length(0) + lanes.hostCount() - 1) / lanes.hostCount(); }

Piece chunkOf(const HostLanes& lanes, int lane, int host) {
  const auto bound = [&](int chunk) {
    return lanes.begin(lane) + std::min(chunk * chunkLength(lanes), lanes.length(lane));
  };
  return {bound(host), bound(host + 1)};
}

Slots::Slots(const HostLanes& lanes, int rank, int size, int64_t slotBytes, int64_t offset, int64_t unitBytes)
    : lanes_(lanes),
      first_(lanes.firstLane(rank)),
      end_(lanes.endLane(rank)),
      slotBytes_(slotBytes),
      unitBytes_(unitBytes),
      counts_(size, 0) {
  for (int lane = first_; lane < end_; ++lane) {
    for (const int owner : lanes.owners(lane)) {
      slots_.push_back({.place = 0, .placeInMessage = counts_[owner]++ * unitBytes_ + offset});
    }
  }
  std::vector<int64_t> begins(size, 0);
  std::exclusive_scan(counts_.begin(), counts_.end(), begins.begin(), int64_t{0});
  auto slot = slots_.begin();
  for (int lane = first_; lane < end_; ++lane) {
    for (const int owner : lanes.owners(lane)) {
      slot->place = begins[owner] * unitBytes_ + slot->placeInMessage;
      ++slot;
    }
  }
}

int64_t Slots::totalBytes() const { return static_cast<int64_t>(slots_.size()) * unitBytes_; }

Communicator::Splits Slots::splits() const {
  Communicator::Splits bytes(counts_);
  for (auto& count : bytes) count *= unitBytes_;
  return bytes;
}

int64_t Slots::longestMessage() const { return *std::max_element(counts_.begin(), counts_.end()) * unitBytes_; }

int64_t Slots::distance(int lane) const {
  if (lanes_.hostCount() == 1) return slotBytes_;
  const int64_t distance = place(lane, 1) - place(lane, 0);
  for (int host = 2; host < lanes_.hostCount(); ++host) {
    if (place(lane, host) - place(lane, host - 1) != distance) return 0;
  }
  return distance >= slotBytes_ ? distance : 0;
}

}  // namespace bagua::compressed
