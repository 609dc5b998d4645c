// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <vector>

namespace bagua {

// Members 0 .. count - 1, halved again and again, the first half never smaller than the second: after `levels()` times
// each is alone. It says in which order many contributions are combined, those of a half before both halves, and in
// which rounds: members that have all of a half of their own need only what one member of the other half has. However
// many halvings a round takes together, the result is the same.
class Halves {
 public:
  explicit Halves(int count);

  [[nodiscard]] int count() const { return count_; }
  [[nodiscard]] int levels() const { return levels_; }
  // What is left of the members in place `slot` of 2^level after `level` halvings; may be empty.
  struct Range {
    int begin;
    int end;
    [[nodiscard]] int size() const { return end - begin; }
  };
  [[nodiscard]] Range range(int level, int slot) const;
  [[nodiscard]] int slotOf(int member, int level) const;

  // The parts that are left before the last halving, one or two members each, or all members where each half is as
  // large as the other.
  [[nodiscard]] Halves ofPairs() const { return Halves(isEven() ? count_ : 1 << (levels_ - 1)); }
  [[nodiscard]] bool isEven() const { return count_ == 1 << levels_; }

  // How many halvings each of `rounds` rounds takes together, the innermost round first.
  [[nodiscard]] std::vector<int> levelsOfRounds(int rounds) const;
  // Fewer rounds would have one of more than kMostLevels halvings, in which a member speaks with more than 31 others.
  [[nodiscard]] int leastRounds() const { return std::max((levels_ + kMostLevels - 1) / kMostLevels, 1); }
  // Messages that a member sends in so many rounds where all parts are of one size. Where some have a member more, the
  // first of the others tells that one too.
  [[nodiscard]] int messagesIn(int rounds) const;

  // What a member does in the round that makes one of the 2^levels parts of a range, which are there after `level`
  // halvings.
  struct Peers {
    // By part: whom it hears, negative where that is itself or the part is empty; and whom it tells.
    std::vector<int> heard;
    std::vector<std::vector<int>> told;
    int ownPart = 0;

    // Those that are not empty, in turn, so that not all members begin with the same one.
    [[nodiscard]] std::vector<int> otherParts() const;
    struct Peer {
      int member;
      bool isTold;
      bool isHeard;
    };
    [[nodiscard]] std::vector<Peer> ofPart(int part) const;
  };
  [[nodiscard]] Peers peersOf(int member, int level, int levels) const;

  static constexpr int kMostLevels = 5;

 private:
  const int count_;
  const int levels_;
};

}  // namespace bagua
