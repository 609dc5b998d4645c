// SPDX-License-Identifier: Apache-2.0
#include "backend/net/loss_watch.h"

#include <algorithm>

namespace bagua::net {
namespace {

// One may have another reason.
constexpr uint64_t kLost = 2;
// Fewer do not tell one share from another.
constexpr uint64_t kLostToCompare = 8;
// Of so many, a line that is worth a thought loses one.
constexpr uint64_t kSentForOne = 5000;
// A round trip that is so much longer than the shortest has waited in a queue.
constexpr std::chrono::microseconds kNoQueue{2000};
// The queue that a connection of its own makes, of a share of the shortest round trip.
constexpr int kQueueShare = 4;
// What a queue has dropped is sent again, and counted, within so many round trips of sending.
constexpr int kRoundTripsOfLosses = 2;
// Where twice as many connections lose more than twice the share, they lose it to each other: the share of a full line
// grows with the square of their number.
constexpr double kOwnLoss = 2.5;
constexpr std::chrono::seconds kHold{30};

}  // namespace

void LossWatch::mark(const Line& line) {
  sentBefore_ = line.sent;
  lostBefore_ = line.lost;
}

void LossWatch::look(const Line& line, int open, Clock::time_point now) {
  if (line.sent < sentBefore_ || line.lost < lostBefore_) return mark(line);
  const bool hasQueue = line.roundTripNow > line.roundTrip + line.roundTrip / kQueueShare + kNoQueue;
  const bool hadQueue = lookedAt_ < queueUntil_;
  lookedAt_ = now;
  if (hasQueue) queueUntil_ = now + kRoundTripsOfLosses * line.roundTripNow;
  const uint64_t sent = line.sent - sentBefore_;
  const uint64_t lost = line.lost - lostBefore_;
  if (hasQueue || hadQueue || sent > kSentForOne * std::max<uint64_t>(lost, 1)) return mark(line);
  if (lost < kLost) return;
  hasLoss_ = true;
  const auto shareOf = [](uint64_t of, uint64_t all) { return static_cast<double>(of) / static_cast<double>(all); };
  if (lostByFewer_ > 0 && shareOf(lost, sent) > kOwnLoss * shareOf(lostByFewer_, sentByFewer_)) {
    if (lost < kLostToCompare) return;
    noMoreBefore_ = now + kHold;
    sentByFewer_ = lostByFewer_ = 0;
    return mark(line);
  }
  mark(line);
  if (now < noMoreBefore_) return;
  sentByFewer_ += sent;
  lostByFewer_ += lost;
  worth_ = std::max(worth_, 2 * open);
}

}  // namespace bagua::net
