// SPDX-License-Identifier: Apache-2.0
// What the ranks of a group tell each other in the store once something has failed: any texts, under any keys. They are
// understood or left out; the error that a user reads can be made of them.
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "backend/health/attendance.h"
#include "backend/health/failure_board.h"
#include "tests/fuzz/fuzzed_bytes.h"

namespace bagua {
namespace {

using fuzz::FuzzedBytes;

constexpr int kRanks = 4;

ProgramFingerprint madeUpProgram(FuzzedBytes& input) {
  ProgramFingerprint program;
  input.fill(&program, sizeof(program));
  return program;
}

std::string madeUpField(FuzzedBytes& input) { return input.coin() ? std::to_string(input.claim()) : input.text(12); }

// Mostly of the right form.
std::string madeUpActivities(FuzzedBytes& input, const ProgramFingerprint& operation) {
  if (input.take<uint8_t>() % 4 == 0) return input.text(255);
  std::ostringstream text;
  for (int64_t lines = input.from(0, 3); lines > 0; --lines) {
    text << (input.coin() ? "cpu" : input.text(4));
    for (int moment = 0; moment < 2; ++moment) {
      text << '\t' << madeUpField(input);
      text << '\t' << (input.coin() ? std::to_string(operation.hash()) : madeUpField(input));
      text << '\t' << madeUpField(input);
      text << '\t' << input.text(24);
    }
    text << (input.take<uint8_t>() % 8 == 0 ? input.text(4) : "\t\n");
  }
  return text.str();
}

bool isSame(const Activity::Moment& one, const Activity::Moment& other) {
  return one.exists == other.exists && one.sequence == other.sequence && one.hash == other.hash &&
         one.age == other.age && one.text == other.text;
}

std::vector<Activity> checkedActivities(const std::string& text) {
  const auto activities = decodeActivities(text);
  const auto again = decodeActivities(encode(activities));
  TORCH_INTERNAL_ASSERT(again.size() == activities.size(), "an activity is lost on its way through the store");
  for (size_t i = 0; i < again.size(); ++i) {
    TORCH_INTERNAL_ASSERT(again[i].executor == activities[i].executor &&
                              isSame(again[i].current, activities[i].current) &&
                              isSame(again[i].completed, activities[i].completed),
                          "an activity changes on its way through the store");
    TORCH_INTERNAL_ASSERT(!activities[i].describe().empty());
  }
  return activities;
}

// Each rank is named once.
void checkAttendance(FuzzedBytes& input, const ProgramFingerprint& operation,
                     const std::map<int, std::vector<Activity>>& answers, const std::vector<int>& silent) {
  const auto found = attendanceOf(operation, input.coin(), "cpu", answers, silent);
  for (const auto& [rank, activity] : found.absent) {
    const bool isWaiting = std::find(found.waiting.begin(), found.waiting.end(), rank) != found.waiting.end();
    TORCH_INTERNAL_ASSERT(answers.contains(rank) && !isWaiting && !activity.empty());
  }
  for (const int rank : found.waiting) TORCH_INTERNAL_ASSERT(answers.contains(rank));
  const bool saysSomething = !found.waiting.empty() || !found.absent.empty() || !found.silent.empty();
  TORCH_INTERNAL_ASSERT(found.describe().empty() != saysSomething);
}

void fillStore(FuzzedBytes& input, c10d::Store& store, const ProgramFingerprint& operation) {
  static const std::array<std::string, 9> kKeys = {"failure",     "failure",       "roll_call/1",
                                                   "roll_call/2", "roll_caller/1", "answer/0",
                                                   "answer/1",    "answer/2",      "roll_caller/2"};
  for (int64_t count = input.from(0, 8); count > 0; --count) {
    const auto& key = kKeys.at(input.take<uint8_t>() % kKeys.size());
    std::ostringstream value;
    value << (input.coin() ? std::to_string(input.from(0, kRanks)) : madeUpField(input));
    value << (input.take<uint8_t>() % 8 == 0 ? "" : " ");
    value << madeUpActivities(input, operation);
    store.set(key, value.str());
  }
}

std::optional<int64_t> calledRoll(FailureBoard& board) {
  try {
    return board.callTheRoll();
  } catch (const std::logic_error&) {
    // The store: what it was to count is no number.
    return std::nullopt;
  }
}

void readStore(FuzzedBytes& input, c10d::Store& store, const ProgramFingerprint& operation) {
  FailureBoard board(store, 0);
  if (const auto failure = board.firstFailure()) TORCH_INTERNAL_ASSERT(failure->rank >= 0, "rank ", failure->rank);
  const int64_t rollCall = board.latestRollCall();
  TORCH_INTERNAL_ASSERT(rollCall >= 0 && rollCall <= 2);
  std::vector<int> missing{1, 2, 3};
  std::map<int, std::vector<Activity>> answers;
  for (const auto& [rank, text] : board.answers(rollCall, missing)) answers[rank] = checkedActivities(text);
  TORCH_INTERNAL_ASSERT(answers.size() + missing.size() == 3);
  checkAttendance(input, operation, answers, missing);
  if (const auto number = calledRoll(board)) TORCH_INTERNAL_ASSERT(*number == rollCall + 1);
}

}  // namespace

void fuzzHealth(FuzzedBytes& input) {
  const auto operation = madeUpProgram(input);
  checkedActivities(madeUpActivities(input, operation));
  const auto store = c10::make_intrusive<c10d::HashStore>();
  c10d::PrefixStore told("health", store);
  fillStore(input, told, operation);
  readStore(input, *store, operation);
}

}  // namespace bagua

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer calls it so
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  bagua::fuzz::FuzzedBytes input(data, size);
  bagua::fuzzHealth(input);
  return 0;
}
