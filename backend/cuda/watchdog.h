// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "backend/health/group_health.h"
#include "backend/operation/operation.h"

namespace bagua {

// What the watchdog must know of a work on a device.
class WatchedWork : public c10d::Work {
 public:
  using Work::Work;

  [[nodiscard]] virtual const Operation& operation() const = 0;
  // Whether the device has done everything. Throws where the device itself has failed.
  [[nodiscard]] virtual bool deviceDone() const = 0;
  // Nothing where the work is done or has failed already.
  virtual void fail(const std::exception_ptr& error) = 0;
  // The device needs nothing of it any more.
  virtual void retire() = 0;
};

// The transports of an executor, as its watchdog sees them. Both calls come from any thread.
class WatchedTransport {
 public:
  virtual ~WatchedTransport() = default;
  [[nodiscard]] virtual std::string asyncError() = 0;
  virtual void abort() = 0;
};

// One thread that looks after the works of one executor: releases what they hold when the device is done, and on a
// timeout or an error fails all of them and aborts the transport. It logs, it never throws and never ends the process.
// All methods may be called from any thread.
class Watchdog {
 public:
  // `prepareThread` runs first on the thread: it must make querying the device safe there. `health` is told of every
  // operation and asked for the cause of every failure; null: this rank is on its own.
  Watchdog(GroupIdentity group, std::shared_ptr<WatchedTransport> transport, std::function<void()> prepareThread,
           std::shared_ptr<OperationLog> health = nullptr);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // The timeout of its operation counts from here. A work that has failed is only kept until the device is done.
  void watch(const c10::intrusive_ptr<WatchedWork>& work, OperationLog::Kind kind = OperationLog::Kind::kProgram);
  // First call wins: fails everything that is not done, then aborts the transport.
  void fail(const std::exception_ptr& cause);
  [[nodiscard]] std::exception_ptr error() const;
  [[nodiscard]] bool isIdle() const;
  [[nodiscard]] bool waitIdle(std::chrono::milliseconds limit);
  // The thread ends when the device has let go of the last work; waits for that as long as `limit`.
  void stop(std::chrono::milliseconds limit);

 private:
  struct Core;
  void startThread();

  // Shared with the thread, which outlives the watchdog while the device holds on to a work.
  const std::shared_ptr<Core> core_;
  std::mutex threadMutex_;
  std::thread thread_;
};

}  // namespace bagua
