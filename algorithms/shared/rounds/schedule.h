// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

namespace bagua::rounds {

// Which fragment travels when. Steps are counted from the one after `begin`, which is 1. With an interval of I = every
// / fragments, fragment f is synchronised after steps (f + 1) I, (f + 1) I + every, ...; what it sends is taken `delay`
// steps before that. The delay is shorter than the interval, so that one fragment is on its way at a time.
class Schedule {
 public:
  // Throws ValueError.
  Schedule(int64_t every, int64_t fragments, int64_t delay, int64_t begin = 0);

  [[nodiscard]] int64_t every() const { return interval_ * fragments_; }
  [[nodiscard]] int64_t fragments() const { return fragments_; }
  [[nodiscard]] int64_t delay() const { return delay_; }
  // The fragment that is taken, or synchronised, after a step.
  [[nodiscard]] std::optional<int64_t> takenAfter(int64_t step) const { return synchronisedAfter(step + delay_); }
  [[nodiscard]] std::optional<int64_t> synchronisedAfter(int64_t step) const {
    const int64_t own = step - begin_;
    if (own <= 0 || own % interval_ != 0) return std::nullopt;
    return (own / interval_ - 1) % fragments_;
  }

 private:
  int64_t fragments_;
  int64_t interval_;
  int64_t delay_;
  int64_t begin_;
};

}  // namespace bagua::rounds
