// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/callback_threads.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>

namespace bagua {
namespace {

// The one thread that is idle when both come takes the first, and is not free for the second. The thread is idle only
// some time after the first task has ended, so that rounds differ: one in which it is idle by then is enough.
TEST(CallbackThreads, ATaskMayWaitForTheOneThatComesAfterIt) {
  for (int round = 0; round < 50; ++round) {
    CallbackThreads threads;
    const auto idle = std::make_shared<std::promise<void>>();
    threads.run([idle] { idle->set_value(); });
    idle->get_future().wait();
    const auto second = std::make_shared<std::promise<void>>();
    const auto first = std::make_shared<std::promise<void>>();
    threads.run([first, waits = second->get_future().share()] {
      waits.wait();
      first->set_value();
    });
    threads.run([second] { second->set_value(); });
    ASSERT_EQ(first->get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  }
}

}  // namespace
}  // namespace bagua
