// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/record_function.h>

#include <cstddef>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "backend/stage_clock.h"

namespace bagua {

// How long the stages of programs have taken, by the clock of the thread that ran them: on the CPU the seconds of that
// thread, on CUDA those of the device, which are known only when the device is done.
class StageSeconds {
 public:
  using Totals = std::map<std::string, double>;

  // Takes what another has counted. What one program brings counts as a whole, when the last of it has come.
  void take(StageSeconds& program);
  // Adds up what has come by now; never waits for what has not.
  [[nodiscard]] const Totals& totals();
  // Programs that have been taken and not added up.
  [[nodiscard]] size_t waiting() const { return taken_.size(); }
  // Counts from zero again. What is still to come counts when it has.
  void reset();

 private:
  friend class Stage;
  friend class Elapsed;
  struct Span {
    // A literal.
    const char* stage;
    Moment begin;
    Moment end;
    // Of what another stage is longer by than it is to be: -1.
    double sign = 1;
  };
  using Spans = std::vector<Span>;

  // Of the stages that have used this since it was taken.
  Spans spans_;
  // Of each that was taken.
  std::deque<Spans> taken_;
  Totals totals_;
};

// Times one stage of a program for as long as it lives and shows it to the profiler. `name` is a literal.
class Stage {
 public:
  Stage(StageSeconds& seconds, const char* name);
  ~Stage();
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

 private:
  StageSeconds& seconds_;
  const char* const name_;
  at::RecordFunction record_;
  const std::optional<Moment> begin_;
};

// Times what is left of its life after other stages inside it.
class Elapsed {
 public:
  Elapsed(StageSeconds& seconds, const char* name, std::vector<std::string> others);
  ~Elapsed();
  Elapsed(const Elapsed&) = delete;
  Elapsed& operator=(const Elapsed&) = delete;

 private:
  StageSeconds& seconds_;
  const char* const name_;
  const std::vector<std::string> others_;
  const size_t spansBefore_;
  const std::optional<Moment> begin_;
};

}  // namespace bagua
