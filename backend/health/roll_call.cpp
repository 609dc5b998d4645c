// SPDX-License-Identifier: Apache-2.0
#include "backend/health/roll_call.h"

#include <algorithm>

#include "backend/health/health_times.h"

namespace bagua {

using Clock = std::chrono::steady_clock;

void RollCall::answer(FailureBoard& board) {
  const int64_t latest = board.latestRollCall();
  if (latest == answered_) return;
  board.answer(latest, encode(activities_()));
  answered_ = latest;
  answeredAt_ = Clock::now();
}

void RollCall::collect(FailureBoard& board) {
  if (number_ == 0 || silent_.empty()) return;
  for (const auto& [rank, text] : board.answers(number_, silent_)) answers_[rank] = decodeActivities(text);
}

bool RollCall::isOver() const { return silent_.empty() || Clock::now() - asked_ >= kAnswerTime; }

RollCall::State RollCall::call(FailureBoard* board, Clock::time_point notBefore, Clock::time_point takeOverAt) {
  if (!board) return State::kOver;
  const auto now = Clock::now();
  const auto isRecent = [&](Clock::time_point asked) {
    return asked >= notBefore && now - asked < kRollCallLead + kAnswerTime;
  };
  if (number_ == 0 || !isRecent(asked_)) {
    if (isAnothersTurn(notBefore, takeOverAt)) return State::kOfAnother;
    // Somebody may have asked since the last look.
    answer(*board);
    if (isAnothersTurn(notBefore, takeOverAt)) return State::kOfAnother;
    const auto number = board->callTheRoll();
    if (!number) {
      outrunAt_ = now;
      return State::kOfAnother;
    }
    // In the place of another rank, whose question has been answered by now.
    const bool isAnswered = answered_ > 0 && isRecent(answeredAt_);
    number_ = isAnswered ? answered_ : *number;
    asked_ = isAnswered ? answeredAt_ : now;
    answers_.clear();
    silent_.clear();
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_) silent_.push_back(rank);
    }
    if (isAnswered) collect(*board);
  }
  return isOver() ? State::kOver : State::kUnderWay;
}

bool RollCall::isAnothersTurn(Clock::time_point notBefore, Clock::time_point takeOverAt) const {
  const auto now = Clock::now();
  const auto asked = std::max(answeredAt_, outrunAt_);
  if (asked < notBefore || now - asked >= kRollCallLead + kAnswerTime) return false;
  return now < takeOverAt || now - asked < kTurnTime;
}

}  // namespace bagua
