// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <vector>

#include "backend/cpu/collectives/halves.h"
#include "backend/cpu/wire.h"

namespace bagua {

// What the owners of a part take the lines between them for. They agree on it now and then: on the longest delay, and
// on the rate of the one that has the least to spare; they count the same calls. By it they choose how to reduce, so
// that all choose the same.
class AgreedLine {
 public:
  // How what the owners have gets to each of them: in so many rounds (see Halves), whole, or in parts, of which each
  // owner reduces one and sends that on in as many rounds.
  struct Way {
    int rounds = 1;
    bool isInParts = false;
  };
  // The fastest for `bytes`, by delay, rate, messages and what each owner reduces. There are `wideBytes` of what is not
  // rounded between rounds.
  [[nodiscard]] Way wayToReduce(const Halves& owners, int64_t bytes, int64_t wideBytes, bool isDivisible) const;
  // Where no owner sends more for there being more rounds.
  [[nodiscard]] int roundsFor(const Halves& owners) const { return wayToReduce(owners, 0, 0, false).rounds; }

  // The next call is one in which they agree.
  [[nodiscard]] bool isDue() const { return calls_ % kCallsBetween == 1; }
  void afterCall() { ++calls_; }
  // What an owner proposes, by those of its lines that are connected. Of all proposals the largest of each number
  // counts, and nothing changes where no owner knows a line. A change raises kWireFormat (rendezvous/wire_format.h).
  using Proposal = std::array<int64_t, 2>;
  static Proposal proposalOf(const std::vector<Wire::Line>& lines);
  void agree(const Proposal& largest);

 private:
  [[nodiscard]] int64_t timeOf(int delays, int messages, int64_t sent, int64_t reduced) const;

  // The first call has yet to show what the lines are like.
  static constexpr int kCallsBetween = 32;
  // Before: as between hosts of one hall.
  std::chrono::microseconds delay_{100};
  int64_t bytesPerSecond_ = 125'000'000;
  int64_t calls_ = 0;
};

}  // namespace bagua
