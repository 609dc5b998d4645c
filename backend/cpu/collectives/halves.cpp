// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/collectives/halves.h"

#include <algorithm>
#include <bit>

namespace bagua {

Halves::Halves(int count) : count_(count), levels_(std::bit_width(static_cast<unsigned>(count - 1))) {}

Halves::Range Halves::range(int level, int slot) const {
  Range range{0, count_};
  for (int bit = level - 1; bit >= 0; --bit) {
    const int middle = range.begin + (range.size() + 1) / 2;
    (((slot >> bit) & 1) == 0 ? range.end : range.begin) = middle;
  }
  return range;
}

int Halves::slotOf(int member, int level) const {
  Range range{0, count_};
  int slot = 0;
  for (int halving = 0; halving < level; ++halving) {
    const int middle = range.begin + (range.size() + 1) / 2;
    const bool isSecond = member >= middle;
    (isSecond ? range.begin : range.end) = middle;
    slot = 2 * slot + (isSecond ? 1 : 0);
  }
  return slot;
}

std::vector<int> Halves::levelsOfRounds(int rounds) const {
  std::vector<int> levels(rounds, levels_ / rounds);
  for (int round = 0; round < levels_ % rounds; ++round) ++levels[round];
  return levels;
}

int Halves::messagesIn(int rounds) const {
  int messages = 0;
  int level = levels_;
  for (const int levels : levelsOfRounds(rounds)) {
    level -= levels;
    messages += std::min(1 << levels, range(level, 0).size()) - 1;
  }
  return messages;
}

Halves::Peers Halves::peersOf(int member, int level, int levels) const {
  const int parts = 1 << levels;
  Peers peers{.heard = std::vector<int>(parts, -1), .told = std::vector<std::vector<int>>(parts)};
  const int slot = slotOf(member, level);
  const Range own = range(level, slot);
  const int place = member - own.begin;
  const int first = slot / parts * parts;
  peers.ownPart = slot - first;
  for (int part = 0; part < parts; ++part) {
    const Range other = range(level, first + part);
    if (part == peers.ownPart || other.size() == 0) continue;
    // The members of a part in turn, where it has fewer.
    peers.heard[part] = other.begin + place % other.size();
    for (int told = place; told < other.size(); told += own.size()) peers.told[part].push_back(other.begin + told);
  }
  return peers;
}

std::vector<int> Halves::Peers::otherParts() const {
  const auto parts = static_cast<int>(heard.size());
  std::vector<int> others;
  for (int step = 1; step < parts; ++step) {
    const int part = (ownPart + step) % parts;
    if (heard[part] >= 0) others.push_back(part);
  }
  return others;
}

std::vector<Halves::Peers::Peer> Halves::Peers::ofPart(int part) const {
  std::vector<Peer> peers;
  for (const int member : told[part]) {
    peers.push_back({.member = member, .isTold = true, .isHeard = member == heard[part]});
  }
  const bool isMutual = std::ranges::any_of(peers, [](const Peer& peer) { return peer.isHeard; });
  if (!isMutual) peers.push_back({.member = heard[part], .isTold = false, .isHeard = true});
  return peers;
}

}  // namespace bagua
