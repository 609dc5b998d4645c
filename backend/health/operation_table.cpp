// SPDX-License-Identifier: Apache-2.0
#include "backend/health/operation_table.h"

#include <algorithm>

namespace bagua {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

}  // namespace

size_t OperationTable::add(std::string name, OperationLog::FindLost findLost) {
  rows_.push_back({.name = std::move(name), .findLost = std::move(findLost)});
  return rows_.size() - 1;
}

OperationLog::Token OperationTable::begin(size_t index, RunningOperation operation) {
  operation.token = nextToken_++;
  rows_[index].running.push_back(operation);
  return nextToken_ - 1;
}

std::optional<RunningOperation> OperationTable::end(size_t index, OperationLog::Token token, bool isSuccess) {
  auto& row = rows_[index];
  const auto found =
      std::ranges::find_if(row.running, [&](const RunningOperation& running) { return running.token == token; });
  if (found == row.running.end()) return std::nullopt;
  const bool isLatest = !row.completed || row.completed->sequence <= found->program.sequence;
  if (isSuccess && found->kind == OperationLog::Kind::kProgram && isLatest) {
    row.completed = found->program;
    row.completedAt = Clock::now();
  }
  const RunningOperation ended = *found;
  row.running.erase(found);
  return ended;
}

bool OperationTable::isIdle() const {
  return std::ranges::all_of(rows_, [](const Row& row) { return row.running.empty(); });
}

bool OperationTable::isRunning(OperationLog::Token token) const {
  const auto isIt = [&](const RunningOperation& running) { return running.token == token; };
  return std::ranges::any_of(rows_, [&](const Row& row) { return std::ranges::any_of(row.running, isIt); });
}

bool OperationTable::hasRunFor(milliseconds time) const {
  return std::ranges::any_of(
      rows_, [&](const Row& row) { return !row.running.empty() && row.running.front().hasTaken(time); });
}

std::vector<std::pair<std::string, RunningOperation>> OperationTable::running() const {
  std::vector<std::pair<std::string, RunningOperation>> all;
  for (const auto& row : rows_) {
    for (const auto& operation : row.running) all.emplace_back(row.name, operation);
  }
  return all;
}

std::vector<std::pair<OperationLog::FindLost, RunningOperation>> OperationTable::watchedFor(milliseconds time) const {
  const auto isSlow = [&](const RunningOperation& running) {
    return running.kind == OperationLog::Kind::kProgram && running.hasTaken(time);
  };
  std::vector<std::pair<OperationLog::FindLost, RunningOperation>> slow;
  for (const auto& row : rows_) {
    const auto found = std::ranges::find_if(row.running, isSlow);
    if (row.findLost && found != row.running.end()) slow.emplace_back(row.findLost, *found);
  }
  return slow;
}

std::vector<Activity> OperationTable::activities() const {
  std::vector<Activity> activities;
  for (const auto& row : rows_) {
    Activity activity{.executor = row.name, .completed = {}, .current = {}};
    if (row.completed) activity.completed = momentOf(*row.completed, row.completedAt);
    const size_t before = activities.size();
    for (const auto& running : row.running) {
      if (running.kind != OperationLog::Kind::kProgram) continue;
      activity.current = momentOf(running.program, running.begun);
      activities.push_back(activity);
    }
    if (activities.size() > before) continue;
    // A message that is waited for tells less about where the rank is than a program.
    if (!row.running.empty()) activity.current = momentOf(row.running[0].program, row.running[0].begun);
    activities.push_back(std::move(activity));
  }
  return activities;
}

void OperationTable::setNextWarning(OperationLog::Token token, Clock::time_point when) {
  for (auto& row : rows_) {
    for (auto& running : row.running) {
      if (running.token == token) running.nextWarning = when;
    }
  }
}

std::vector<OperationLog::Abort> OperationTable::takeAborts() {
  std::vector<OperationLog::Abort> aborts;
  for (auto& row : rows_) {
    if (row.abort) aborts.push_back(std::move(row.abort));
  }
  return aborts;
}

}  // namespace bagua
