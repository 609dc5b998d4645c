// SPDX-License-Identifier: Apache-2.0
#include "backend/stage_clock.h"

#include <utility>

namespace bagua {
namespace {

struct CpuClock final : StageClock {
  std::optional<Moment> now() override {
    return Moment{.onCpu = std::chrono::steady_clock::now(), .onDevice = nullptr};
  }
};

struct NoClock final : StageClock {
  std::optional<Moment> now() override { return std::nullopt; }
};

StageClock*& currentClock() {
  thread_local StageClock* clock = &StageClock::cpu();
  return clock;
}

}  // namespace

StageClock& StageClock::cpu() {
  static CpuClock clock;
  return clock;
}

StageClock& StageClock::none() {
  static NoClock clock;
  return clock;
}

StageClock& StageClock::current() { return *currentClock(); }

StageClock::Scope::Scope(StageClock& clock) : before_(std::exchange(currentClock(), &clock)) {}

StageClock::Scope::~Scope() { currentClock() = before_; }

}  // namespace bagua
