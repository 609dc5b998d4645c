// SPDX-License-Identifier: Apache-2.0
#include "backend/health/failure_board.h"

#include <algorithm>
#include <charconv>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

namespace bagua {
namespace {

// No call below waits for a key, unless it has been deleted by somebody else.
constexpr std::chrono::milliseconds kStoreTimeout{2000};
// How long a rank that has taken a number may take to write its text.
constexpr int kLooksAtUnfinished = 10;
constexpr std::chrono::milliseconds kLookInterval{20};

constexpr const char* kFailureKey = "failure";
std::string rollCallKey(int64_t number) { return "roll_call/" + std::to_string(number); }
std::string rollCallerKey(int64_t number) { return "roll_caller/" + std::to_string(number); }
std::string answerKey(int rank) { return "answer/" + std::to_string(rank); }

// "12 text": a number, and what follows the blank.
std::optional<std::pair<int64_t, std::string>> numberAndText(const std::string& value) {
  int64_t number = 0;
  const char* const end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, number);
  if (error != std::errc() || stop == end || *stop != ' ') return std::nullopt;
  return std::pair(number, std::string(stop + 1, end));
}

}  // namespace

FailureBoard::FailureBoard(c10d::Store& store, int rank)
    : pulse_(StorePulse::of(store)),
      store_(c10::make_intrusive<c10d::PrefixStore>("health", store.clone())),
      rank_(rank) {
  store_->setTimeout(kStoreTimeout);
}

Failure FailureBoard::report(const std::string& message) {
  // Counted, because not every store can set a key only where there is none.
  if (store_->add("failures", 1) > 1) {
    // Not there: its rank is about to write it, or has ended in between.
    for (int look = 0; look < kLooksAtUnfinished; ++look) {
      if (const auto first = firstFailure()) return announced(*first);
      std::this_thread::sleep_for(kLookInterval);
    }
  }
  // Another one, after all: this rank has taken long to come here.
  if (const auto first = firstFailure()) return announced(*first);
  store_->set(kFailureKey, std::to_string(rank_) + " " + message);
  pulse_->beat(*store_);
  return {rank_, message};
}

// It may be this rank's own, of an attempt in which the store was lost before the others could be told.
Failure FailureBoard::announced(Failure failure) {
  if (failure.rank == rank_) pulse_->beat(*store_);
  return failure;
}

std::optional<Failure> FailureBoard::firstFailure() {
  if (!store_->check({kFailureKey})) return std::nullopt;
  const auto reported = numberAndText(store_->get_to_str(kFailureKey));
  if (!reported || reported->first < 0 || !std::in_range<int>(reported->first)) return std::nullopt;
  return Failure{static_cast<int>(reported->first), reported->second};
}

std::optional<int64_t> FailureBoard::callTheRoll() {
  const int64_t latest = latestRollCall();
  const int64_t number = std::max(latest, triedRollCall_) + 1;
  triedRollCall_ = number;
  if (store_->add(rollCallerKey(number), 1) != 1) return std::nullopt;
  // Earlier ones, whose callers have ended before they could call, would hide this one.
  for (int64_t missing = latest + 1; missing <= number; ++missing) {
    store_->set(rollCallKey(missing), std::to_string(rank_));
  }
  pulse_->beat(*store_);
  return number;
}

int64_t FailureBoard::latestRollCall() {
  while (store_->check({rollCallKey(seenRollCall_ + 1)})) ++seenRollCall_;
  return seenRollCall_;
}

void FailureBoard::answer(int64_t rollCall, const std::string& text) {
  store_->set(answerKey(rank_), std::to_string(rollCall) + " " + text);
}

std::map<int, std::string> FailureBoard::answers(int64_t rollCall, std::vector<int>& missing) {
  std::map<int, std::string> found;
  std::erase_if(missing, [&](int rank) {
    if (!store_->check({answerKey(rank)})) return false;
    auto answer = numberAndText(store_->get_to_str(answerKey(rank)));
    if (!answer || answer->first < rollCall) return false;
    found.emplace(rank, std::move(answer->second));
    return true;
  });
  return found;
}

}  // namespace bagua
