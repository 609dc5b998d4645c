// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/channel_turns.h"

#include <algorithm>

namespace bagua {

bool ChannelTurns::Unseen::conflictsWith(const MemoryUse& memory) const {
  return isExclusive || uses.size() > kMostCompared ||
         std::ranges::any_of(uses, [&](const MemoryUse& use) { return use.conflictsWith(memory); });
}

ChannelTurns::Turn ChannelTurns::next(bool mayOverlap, const MemoryUse& memory) {
  if (channels_ == 1) return {};
  Turn turn;
  const bool isExclusive = !mayOverlap || !memory.isKnown();
  // By `mayOverlap` alone: what a tensor tells of its memory is this rank's own.
  if (mayOverlap) turn.channel = turn_++ % channels_;
  Unseen& others = unseen_.at(1 - turn.channel);
  turn.waitsForOther = others.isSome && (isExclusive || others.conflictsWith(memory));
  if (turn.waitsForOther) others = {};
  Unseen& own = unseen_.at(turn.channel);
  own.isSome = true;
  own.isExclusive = own.isExclusive || isExclusive;
  if (own.uses.size() <= kMostCompared) own.uses.push_back(memory);
  return turn;
}

void ChannelTurns::takeBack(bool mayOverlap) {
  if (channels_ == 1) return;
  if (mayOverlap) --turn_;
  for (auto& unseen : unseen_) unseen.isSome = unseen.isExclusive = true;
}

}  // namespace bagua
