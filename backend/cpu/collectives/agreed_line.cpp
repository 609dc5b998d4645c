// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/collectives/agreed_line.h"

#include <algorithm>
#include <limits>

#include "backend/cpu/collectives/reduction.h"

namespace bagua {
namespace {

// Of a message, on both sides: system calls, and threads that are woken. Eight ranks on two cores passed one every
// 27 us.
constexpr int64_t kMessageNanoseconds = 25'000;
// Of a tensor that goes whole to several: an owner keeps as much of each other one that it hears.
constexpr int64_t kMostInRounds = int64_t{4} << 20;
// What an owner reduces, with the copies of what the others have not acknowledged when that changes. Between two hosts
// on two cores of one machine, an allreduce of 4 and of 16 MiB in parts took 0.6 of the time of one that goes whole.
constexpr int64_t kReducedBytesPerSecond = 3'000'000'000;
constexpr int64_t kNanoseconds = 1'000'000'000;
// So that its remainder times kNanoseconds fits.
constexpr int64_t kFastest = 9'000'000'000;
// Of an owner that knows nothing of its lines, and leaves it to the others.
constexpr AgreedLine::Proposal kNoProposal{0, std::numeric_limits<int64_t>::min()};

// In whole numbers: every processor and compiler gets the same, so that all ranks choose the same way.
int64_t nanosecondsOf(int64_t bytes, int64_t bytesPerSecond) {
  const int64_t rate = std::min(bytesPerSecond, kFastest);
  return bytes / rate * kNanoseconds + bytes % rate * kNanoseconds / rate;
}

}  // namespace

int64_t AgreedLine::timeOf(int delays, int messages, int64_t sent, int64_t reduced) const {
  return delays * std::chrono::nanoseconds(delay_).count() + messages * kMessageNanoseconds +
         nanosecondsOf(sent, bytesPerSecond_) + nanosecondsOf(reduced, kReducedBytesPerSecond);
}

AgreedLine::Way AgreedLine::wayToReduce(const Halves& owners, int64_t bytes, int64_t wideBytes,
                                        bool isDivisible) const {
  Way best;
  int64_t least = std::numeric_limits<int64_t>::max();
  const auto consider = [&](const Way& way, int64_t time) {
    if (time >= least) return;
    least = time;
    best = way;
  };
  const bool isInOrder = owners.count() <= reduction::kMostInOrder;
  if (bytes <= kMostInRounds || owners.count() == 2 || !isDivisible) {
    for (int rounds = owners.leastRounds(); rounds <= (isInOrder ? 1 : owners.levels()); ++rounds) {
      const int messages = owners.messagesIn(rounds);
      const int64_t sent = messages * (rounds > 1 ? wideBytes : bytes);
      consider({.rounds = rounds, .isInParts = false}, timeOf(rounds, messages, sent, sent));
    }
  }
  if (!isDivisible) return best;
  const int others = owners.count() - 1;
  if (owners.leastRounds() == 1) {
    const int64_t sent = int64_t{2} * others * bytes / owners.count();
    consider({.rounds = 1, .isInParts = true}, timeOf(2, 2 * others, sent, sent / 2));
  }
  if (isInOrder) return best;
  const Halves pairs = owners.ofPairs();
  // There and back, where two owners do the work of one.
  const int folds = pairs.count() == owners.count() ? 0 : 1;
  for (int rounds = std::max(2, pairs.leastRounds()); rounds <= pairs.levels(); ++rounds) {
    const int64_t sent = (1 + folds) * (bytes + wideBytes);
    consider({.rounds = rounds, .isInParts = true},
             timeOf(2 * (rounds + folds), 2 * (pairs.messagesIn(rounds) + folds), sent, sent / 2));
  }
  return best;
}

AgreedLine::Proposal AgreedLine::proposalOf(const std::vector<Wire::Line>& lines) {
  // Not the longest: a connection that is young, on a busy machine, may have seen nothing but delays of its own making.
  std::vector<int64_t> delays;
  int64_t bytesPerSecond = 0;
  for (const auto& line : lines) {
    // Not connected yet.
    if (line.bytesPerSecond <= 0) continue;
    delays.push_back(line.delay.count());
    bytesPerSecond += line.bytesPerSecond;
  }
  if (delays.empty()) return kNoProposal;
  const auto middle = delays.begin() + static_cast<int64_t>(delays.size() / 2);
  std::nth_element(delays.begin(), middle, delays.end());
  return {*middle, -bytesPerSecond};
}

void AgreedLine::agree(const Proposal& largest) {
  const auto& [delay, negativeRate] = largest;
  if (largest == kNoProposal || negativeRate >= 0) return;
  delay_ = std::chrono::microseconds(delay);
  bytesPerSecond_ = -negativeRate;
}

}  // namespace bagua
