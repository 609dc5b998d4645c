// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "backend/communicator.h"
#include "backend/topology/host_lanes.h"
#include "kernels/codec.h"

namespace bagua::compressed {

// Elements of the flat tensor, of a lane cut into a chunk per host. Chunks have the length that the first lane's have,
// which is the longest; the last ones of a lane may be shorter or empty.
int64_t chunkLength(const HostLanes& lanes);
Piece chunkOf(const HostLanes& lanes, int lane, int host);

inline at::Tensor elementsOf(const at::Tensor& flat, const Piece& piece) {
  return flat.narrow(0, piece.begin, piece.end - piece.begin);
}

// Which packed chunk lies where in the messages between the owners of lanes. Each lane is cut into a chunk per host,
// and the chunk of a host belongs to the lane's owner there. Every (lane, host) pair of a rank's own lanes is a slot;
// the message to a rank is the slots that the two share, in ascending order of lanes, and so is what comes back. Lanes
// are of equal stride, so slots are of equal size. Where several flat tensors travel at once (sections), the slots of a
// lane in all of them lie together, in the order of the sections, and make a unit.
class Slots {
 public:
  // Of a section: its slots are `offset` behind the begin of a unit of `unitBytes`. `lanes` has to outlive it.
  Slots(const HostLanes& lanes, int rank, int size, int64_t slotBytes, int64_t offset, int64_t unitBytes);

  [[nodiscard]] const HostLanes& lanes() const { return lanes_; }
  // Ranks of the communicator.
  [[nodiscard]] int participants() const { return static_cast<int>(counts_.size()); }
  [[nodiscard]] int firstLane() const { return first_; }
  [[nodiscard]] int endLane() const { return end_; }
  [[nodiscard]] int64_t slotBytes() const { return slotBytes_; }
  // Of all messages, with all sections.
  [[nodiscard]] int64_t totalBytes() const;
  [[nodiscard]] Communicator::Splits splits() const;
  // The longest message to one rank.
  [[nodiscard]] int64_t longestMessage() const;

  // Where the slot begins: in all messages, and in its own.
  [[nodiscard]] int64_t place(int lane, int host) const { return slot(lane, host).place; }
  [[nodiscard]] int64_t placeInMessage(int lane, int host) const { return slot(lane, host).placeInMessage; }
  // Bytes from a slot of a lane to that of the next host, if that is the same for all hosts and not less than a slot;
  // or 0.
  [[nodiscard]] int64_t distance(int lane) const;

 private:
  struct Slot {
    int64_t place = 0;
    int64_t placeInMessage = 0;
  };
  [[nodiscard]] const Slot& slot(int lane, int host) const {
    return slots_[static_cast<size_t>(lane - first_) * lanes_.hostCount() + host];
  }

  const HostLanes& lanes_;
  const int first_;
  const int end_;
  const int64_t slotBytes_;
  const int64_t unitBytes_;
  // Units shared with each rank.
  std::vector<int64_t> counts_;
  std::vector<Slot> slots_;
};

}  // namespace bagua::compressed
