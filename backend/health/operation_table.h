// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backend/health/attendance.h"
#include "backend/health/operation_log.h"
#include "backend/operation/program_fingerprint.h"

namespace bagua {

// An operation under way.
struct RunningOperation {
  OperationLog::Token token = 0;
  ProgramFingerprint program;
  OperationLog::Kind kind = OperationLog::Kind::kProgram;
  std::chrono::steady_clock::time_point begun;
  std::chrono::milliseconds timeout{0};
  std::chrono::steady_clock::time_point nextWarning;
  // In the flight recorder.
  uint64_t recorded = 0;

  [[nodiscard]] bool isOverdue() const { return std::chrono::steady_clock::now() >= begun + timeout; }
  [[nodiscard]] bool hasTaken(std::chrono::milliseconds time) const {
    return std::chrono::steady_clock::now() - begun >= time;
  }
};

// What is under way on this rank, by executor, and what each has completed last. Its owner locks.
class OperationTable {
 public:
  // For an executor that is called `name` on every rank; returns its index.
  size_t add(std::string name, OperationLog::FindLost findLost);
  void onFailure(size_t index, OperationLog::Abort abort) { rows_[index].abort = std::move(abort); }

  OperationLog::Token begin(size_t index, RunningOperation operation);
  // The operation that has ended; nothing where it had ended before.
  std::optional<RunningOperation> end(size_t index, OperationLog::Token token, bool isSuccess);

  [[nodiscard]] bool isIdle() const;
  [[nodiscard]] bool isRunning(OperationLog::Token token) const;
  [[nodiscard]] bool hasRunFor(std::chrono::milliseconds time) const;
  // Every operation under way, with the name of its executor.
  [[nodiscard]] std::vector<std::pair<std::string, RunningOperation>> running() const;
  // Of every executor whose peers are watched, the first program that has taken this long.
  [[nodiscard]] std::vector<std::pair<OperationLog::FindLost, RunningOperation>> watchedFor(
      std::chrono::milliseconds time) const;
  // What this rank answers in a roll call.
  [[nodiscard]] std::vector<Activity> activities() const;

  void setNextWarning(OperationLog::Token token, std::chrono::steady_clock::time_point when);
  // How to end all operations of each executor; once.
  std::vector<OperationLog::Abort> takeAborts();

 private:
  struct Row {
    std::string name;
    OperationLog::FindLost findLost;
    // They are in the order of their beginnings.
    std::vector<RunningOperation> running = {};
    std::optional<ProgramFingerprint> completed = {};
    std::chrono::steady_clock::time_point completedAt = {};
    OperationLog::Abort abort = {};
  };

  std::vector<Row> rows_;
  OperationLog::Token nextToken_ = 1;
};

}  // namespace bagua
