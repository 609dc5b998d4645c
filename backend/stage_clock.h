// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <optional>

namespace bagua {

// A place in what a program makes a device do.
class DeviceMoment {
 public:
  virtual ~DeviceMoment() = default;
  // Whether the device has come there: asks, and never waits.
  [[nodiscard]] virtual bool hasCome() const = 0;
  // Of two moments of one clock that have come.
  [[nodiscard]] virtual double secondsSince(const DeviceMoment& earlier) const = 0;
};

// When a stage of a program begins or ends.
struct Moment {
  std::chrono::steady_clock::time_point onCpu;
  // Null where the CPU does the work itself.
  std::shared_ptr<const DeviceMoment> onDevice;

  [[nodiscard]] bool hasCome() const { return !onDevice || onDevice->hasCome(); }
  [[nodiscard]] double secondsSince(const Moment& earlier) const {
    if (onDevice) return onDevice->secondsSince(*earlier.onDevice);
    return std::chrono::duration<double>(onCpu - earlier.onCpu).count();
  }
};

// By what the stages of a program are timed: the CPU's clock where its thread does the work, the device's where it
// only enqueues it. Each thread has a current one, as it has a current stream: the executor's choice for the program
// that runs there.
class StageClock {
 public:
  virtual ~StageClock() = default;
  // Nothing where the clock cannot tell.
  virtual std::optional<Moment> now() = 0;

  static StageClock& cpu();
  // Tells nothing: the stages are not timed.
  static StageClock& none();
  static StageClock& current();

  // While it lives, `clock` is this thread's.
  class Scope {
   public:
    explicit Scope(StageClock& clock);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    StageClock* const before_;
  };
};

}  // namespace bagua
