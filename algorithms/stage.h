// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/record_function.h>

#include <chrono>
#include <map>
#include <string>

namespace bagua {

// Seconds that the thread running the programs spent in each stage. On CUDA that is the time to enqueue it.
using StageSeconds = std::map<std::string, double>;

inline void addTo(StageSeconds& total, const StageSeconds& seconds) {
  for (const auto& [stage, time] : seconds) total[stage] += time;
}

// Times one stage of a program for as long as it lives and shows it to the profiler. `name` is a literal.
class Stage {
 public:
  Stage(StageSeconds& seconds, const char* name)
      : seconds_(seconds), name_(name), record_(at::RecordScope::USER_SCOPE), begin_(std::chrono::steady_clock::now()) {
    if (record_.isActive()) record_.before(name_);
  }
  ~Stage() { seconds_[name_] += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

 private:
  StageSeconds& seconds_;
  const char* name_;
  at::RecordFunction record_;
  const std::chrono::steady_clock::time_point begin_;
};

}  // namespace bagua
