// SPDX-License-Identifier: Apache-2.0
#include "algorithms/stage.h"

#include <algorithm>
#include <utility>

namespace bagua {
namespace {

// Programs of a device whose spans are kept before they are asked whether they have come.
constexpr size_t kMostWaiting = 64;

}  // namespace

void StageSeconds::take(StageSeconds& program) {
  for (const auto& [stage, seconds] : std::exchange(program.totals_, {})) totals_[stage] += seconds;
  Spans spans;
  for (const auto& taken : std::exchange(program.taken_, {})) spans.insert(spans.end(), taken.begin(), taken.end());
  const Spans own = std::exchange(program.spans_, {});
  spans.insert(spans.end(), own.begin(), own.end());
  if (!spans.empty()) taken_.push_back(std::move(spans));
  // Somebody may never ask for the totals. The host's spans have come, and those of a device are bounded.
  if (taken_.size() == 1 || taken_.size() > kMostWaiting) static_cast<void>(totals());
}

const StageSeconds::Totals& StageSeconds::totals() {
  // From the end: a device comes there last.
  const auto hasCome = [](const Spans& spans) {
    return std::all_of(spans.rbegin(), spans.rend(), [](const Span& span) { return span.end.hasCome(); });
  };
  std::erase_if(taken_, [&](const Spans& spans) {
    if (!hasCome(spans)) return false;
    for (const auto& span : spans) totals_[span.stage] += span.sign * span.end.secondsSince(span.begin);
    return true;
  });
  return totals_;
}

void StageSeconds::reset() {
  static_cast<void>(totals());
  totals_.clear();
}

Stage::Stage(StageSeconds& seconds, const char* name)
    : seconds_(seconds), name_(name), record_(at::RecordScope::USER_SCOPE), begin_(StageClock::current().now()) {
  if (record_.isActive()) record_.before(name_);
}

Stage::~Stage() {
  const auto end = begin_ ? StageClock::current().now() : std::nullopt;
  if (end) seconds_.spans_.push_back({.stage = name_, .begin = *begin_, .end = *end});
}

Elapsed::Elapsed(StageSeconds& seconds, const char* name, std::vector<std::string> others)
    : seconds_(seconds),
      name_(name),
      others_(std::move(others)),
      spansBefore_(seconds.spans_.size()),
      begin_(StageClock::current().now()) {}

Elapsed::~Elapsed() {
  const auto end = begin_ ? StageClock::current().now() : std::nullopt;
  if (!end) return;
  auto& spans = seconds_.spans_;
  for (size_t i = spansBefore_, count = spans.size(); i < count; ++i) {
    if (std::find(others_.begin(), others_.end(), spans[i].stage) == others_.end()) continue;
    spans.push_back({.stage = name_, .begin = spans[i].begin, .end = spans[i].end, .sign = -spans[i].sign});
  }
  spans.push_back({.stage = name_, .begin = *begin_, .end = *end});
}

}  // namespace bagua
