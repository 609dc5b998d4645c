// SPDX-License-Identifier: Apache-2.0
#include "backend/health/failure_board.h"

#include <charconv>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace bagua {
namespace {

// No call below waits for a key, unless it has been deleted by somebody else.
constexpr std::chrono::milliseconds kStoreTimeout{2000};
// How long a rank that has taken a number may take to write its text.
constexpr int kLooksAtUnfinished = 10;
constexpr std::chrono::milliseconds kLookInterval{20};

std::string failureKey(int64_t number) { return "failure/" + std::to_string(number); }
std::string rollCallKey(int64_t number) { return "roll_call/" + std::to_string(number); }
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
    : store_(c10::make_intrusive<c10d::PrefixStore>("health", store.clone())), rank_(rank) {
  store_->setTimeout(kStoreTimeout);
}

Failure FailureBoard::report(const std::string& message) {
  // Numbered, because not every store can set a key only where there is none.
  const int64_t number = store_->add("failures", 1);
  store_->set(failureKey(number), std::to_string(rank_) + " " + message);
  for (int64_t earlier = 1; earlier < number; ++earlier) {
    // Not there: its rank is about to write it, or has ended in between.
    for (int look = 0; look < kLooksAtUnfinished; ++look) {
      if (const auto failure = failureNumber(earlier)) return *failure;
      std::this_thread::sleep_for(kLookInterval);
    }
  }
  return {rank_, message};
}

std::optional<Failure> FailureBoard::failureNumber(int64_t number) {
  if (!store_->check({failureKey(number)})) return std::nullopt;
  const auto reported = numberAndText(store_->get_to_str(failureKey(number)));
  if (!reported) return std::nullopt;
  return Failure{static_cast<int>(reported->first), reported->second};
}

int64_t FailureBoard::callTheRoll() {
  const int64_t number = store_->add("roll_calls", 1);
  store_->set(rollCallKey(number), std::to_string(rank_));
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
