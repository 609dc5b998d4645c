// SPDX-License-Identifier: Apache-2.0
#include "backend/os/fork_held_mutex.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "backend/health/flight_recorder.h"
#include "backend/health/store_pulse.h"
#include "backend/net/process_transport.h"

namespace bagua {
namespace {

// Forks while other threads do `work` again and again. The children, which do it once, come to an end.
void expectChildrenCan(const std::function<void()>& work) {
  constexpr int kForks = 25;
  work();
  std::atomic<bool> isOver = false;
  const auto loop = [&] {
    while (!isOver) work();
  };
  std::thread first(loop);
  std::thread second(loop);
  int stuck = 0;
  for (int turn = 0; turn < kForks && stuck == 0; ++turn) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(10);
      work();
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    stuck += status == 0 ? 0 : 1;
  }
  isOver = true;
  first.join();
  second.join();
  EXPECT_EQ(stuck, 0);
}

TEST(ForkHeldMutex, IsFreeInAForkedChild) {
  ForkHeldMutex mutex;
  int64_t counts[2] = {};
  expectChildrenCan([&] {
    const std::lock_guard lock(mutex);
    ++counts[0];
    ++counts[1];
    if (counts[0] != counts[1]) std::abort();
  });
}

// In the order in which they were made, or in the other one.
TEST(ForkHeldMutex, TwoMayBeTakenInEitherOrder) {
  std::array<ForkHeldMutex, 4> mutexes;
  expectChildrenCan([&] {
    const std::lock_guard first(mutexes[0]);
    const std::lock_guard second(mutexes[1]);
  });
  expectChildrenCan([&] {
    const std::lock_guard first(mutexes[3]);
    const std::lock_guard second(mutexes[2]);
  });
}

TEST(ForkHeldMutex, AForkedChildCanRecordOperations) {
  auto& recorder = FlightRecorder::instance();
  const auto group = recorder.addGroup({.name = "forks", .rank = 0, .globalRanks = {0}});
  const Operation operation{.name = "bagua:all_reduce", .timeout = std::chrono::seconds(1)};
  expectChildrenCan([&] { recorder.end(recorder.begin(group, operation, fingerprintOf(operation)), true); });
}

TEST(ForkHeldMutex, AForkedChildCanFindThePulseOfItsStore) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  expectChildrenCan([&] { StorePulse::of(*store); });
}

// The parent's may be in a call of the store, which holds it.
TEST(ForkHeldMutex, AForkedChildHasAPulseOfItsOwn) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto parents = StorePulse::of(*store);
  const pid_t child = ::fork();
  if (child == 0) ::_exit(StorePulse::of(*store) == parents ? 1 : 0);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(ForkHeldMutex, AForkedChildCanHaveATransport) {
  expectChildrenCan([] { net::processTransport(); });
}

}  // namespace
}  // namespace bagua
