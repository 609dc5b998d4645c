// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "backend/operation/memory_use.h"

namespace bagua {

// Which of a group's channels a program runs on, and what it waits for there, where there are two: programs that may
// overlap take turns, so that one is coded while another is on the network. All others run on the first channel, behind
// whatever came before them and before whatever comes after. The turns depend on nothing but the order of submission,
// which is the same on all ranks. What a program waits for may differ between them: only ever for earlier ones.
class ChannelTurns {
 public:
  static constexpr size_t kMostChannels = 2;
  // A program waits for the other channel where more than this many there have to be compared with it.
  static constexpr size_t kMostCompared = 64;

  explicit ChannelTurns(size_t channels) : channels_(channels) {}

  struct Turn {
    size_t channel = 0;
    // For all that the other channel holds by now.
    bool waitsForOther = false;
  };
  Turn next(bool mayOverlap, const MemoryUse& memory);
  // After a program that has left no trace at the other ranks: the next that may overlap has its turn. Whether its wait
  // was enqueued is not known, so the next on either channel waits for the other.
  void takeBack(bool mayOverlap);
  // Of a program that is recorded into a CUDA graph: on one stream, and apart from what runs now.
  [[nodiscard]] static Turn ofCaptured() { return {}; }

 private:
  // What one channel has been given since the other last waited for it.
  struct Unseen {
    bool isSome = false;
    // Nothing may run beside it.
    bool isExclusive = false;
    std::vector<MemoryUse> uses = {};

    [[nodiscard]] bool conflictsWith(const MemoryUse& memory) const;
  };

  const size_t channels_;
  size_t turn_ = 0;
  std::array<Unseen, kMostChannels> unseen_;
};

}  // namespace bagua
