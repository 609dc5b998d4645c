// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/record_function.h>

#include <chrono>
#include <map>
#include <string>
#include <utility>
#include <vector>

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

// Times what is left of its life after other stages inside it.
class Elapsed {
 public:
  Elapsed(StageSeconds& seconds, const char* name, std::vector<std::string> others)
      : seconds_(seconds),
        name_(name),
        others_(std::move(others)),
        before_(ofOthers()),
        begin_(std::chrono::steady_clock::now()) {}
  ~Elapsed() {
    const double total = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
    seconds_[name_] += total - (ofOthers() - before_);
  }
  Elapsed(const Elapsed&) = delete;
  Elapsed& operator=(const Elapsed&) = delete;

 private:
  [[nodiscard]] double ofOthers() const {
    double sum = 0;
    for (const auto& other : others_) sum += seconds_[other];
    return sum;
  }

  StageSeconds& seconds_;
  const char* name_;
  const std::vector<std::string> others_;
  const double before_;
  const std::chrono::steady_clock::time_point begin_;
};

}  // namespace bagua
