// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "backend/health/attendance.h"
#include "backend/health/failure_board.h"

namespace bagua {

// How a rank finds out what the others are doing. One rank calls the roll for all that want to know, and tells them by
// what it reports: the others need only wait, and take its place where it is behind. For one thread.
class RollCall {
 public:
  enum class State { kUnderWay, kOver, kOfAnother };

  // `activities` tells what this rank is doing.
  RollCall(int rank, int size, std::function<std::vector<Activity>()> activities)
      : rank_(rank), size_(size), activities_(std::move(activities)) {}

  // Answers a roll call of another rank, if there is a new one.
  void answer(FailureBoard& board);
  // Reads what has been answered to the own one by now.
  void collect(FailureBoard& board);
  // Calls the roll, unless that has been done since `notBefore`, and lately. From `takeOverAt` on also in the place of
  // another rank. Over at once where there is no board.
  State call(FailureBoard* board, std::chrono::steady_clock::time_point notBefore,
             std::chrono::steady_clock::time_point takeOverAt);

  // Whether answers are awaited.
  [[nodiscard]] bool isUnderWay() const { return number_ != 0 && !isOver(); }
  // Of the own roll calls, the latest; 0: none so far.
  [[nodiscard]] int64_t number() const { return number_; }
  [[nodiscard]] const std::map<int, std::vector<Activity>>& answers() const { return answers_; }
  // Who has not answered.
  [[nodiscard]] const std::vector<int>& silent() const { return silent_; }

 private:
  [[nodiscard]] bool isOver() const;
  [[nodiscard]] bool isAnothersTurn(std::chrono::steady_clock::time_point notBefore,
                                    std::chrono::steady_clock::time_point takeOverAt) const;

  const int rank_;
  const int size_;
  const std::function<std::vector<Activity>()> activities_;
  int64_t number_ = 0;
  std::chrono::steady_clock::time_point asked_;
  std::map<int, std::vector<Activity>> answers_;
  std::vector<int> silent_;
  // The latest roll call that this rank has answered, and when.
  int64_t answered_ = 0;
  std::chrono::steady_clock::time_point answeredAt_;
  // When another rank was faster in calling the roll.
  std::chrono::steady_clock::time_point outrunAt_;
};

}  // namespace bagua
