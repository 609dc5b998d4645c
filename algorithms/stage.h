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

// What stages are called in handle.stats() and in traces. Algorithms take their names from here, so that the figures of
// two line up; who needs another adds it.
namespace stages {

// The network, and waiting for the slowest rank.
inline constexpr const char* kAllReduce = "allreduce";
inline constexpr const char* kReduceScatter = "reduce_scatter";
inline constexpr const char* kSparseAllReduce = "sparse_allreduce";
inline constexpr const char* kReduceInHost = "reduce_in_host";
inline constexpr const char* kExchange = "exchange";
inline constexpr const char* kGather = "gather";
inline constexpr const char* kGatherInHost = "gather_in_host";
// Coding: values to messages, the copies of a chunk to its mean, messages to values, and what coding leaves behind.
inline constexpr const char* kCompress = "compress";
inline constexpr const char* kReduce = "reduce";
inline constexpr const char* kDecompress = "decompress";
inline constexpr const char* kKeepResiduals = "keep_residuals";
inline constexpr const char* kCheck = "check";
inline constexpr const char* kGuard = "guard";
inline constexpr const char* kUpdateMomentum = "update_momentum";
// Factors.
inline constexpr const char* kMultiply = "multiply";
inline constexpr const char* kAllReduceP = "allreduce_p";
inline constexpr const char* kMultiplyTransposed = "multiply_transposed";
inline constexpr const char* kAllReduceQ = "allreduce_q";
inline constexpr const char* kReplace = "replace";
// Weights.
inline constexpr const char* kAverageWeights = "average_weights";
inline constexpr const char* kBroadcastWeights = "broadcast_weights";
inline constexpr const char* kCompareWeights = "compare_weights";
inline constexpr const char* kStartRounds = "start_rounds";
inline constexpr const char* kMeasureLine = "measure_line";
inline constexpr const char* kAgreeOnSchedule = "agree_on_schedule";
inline constexpr const char* kAverageFragment = "average_fragment";
inline constexpr const char* kOuterStep = "outer_step";
inline constexpr const char* kAverageBuffers = "average_buffers";

}  // namespace stages

// Times one stage of a program for as long as it lives and shows it to the profiler. `name` is one of `stages`.
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
