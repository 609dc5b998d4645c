// SPDX-License-Identifier: Apache-2.0
#include "backend/process_group/change_attempt.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <future>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace bagua {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

// Each test takes an address of its own, as threads that were given up are counted by address.
MemberHandle memberAt(uint16_t port) {
  return {.rank = 3, .token = "0123456789abcdef", .address = "10.0.0.1", .port = port};
}

Meeting meetingAt(const c10::intrusive_ptr<c10d::Store>& store) {
  return {.store = store, .members = {.topology = HostTopology({"host"}), .addresses = {"none: a test"}}};
}

// A store that does not answer before it is told to.
struct SilentStore {
  std::promise<void> answers;
  std::shared_future<void> answered = answers.get_future();
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();

  [[nodiscard]] std::function<Meeting()> meet() const {
    return [answered = answered, store = store] {
      answered.wait();
      return meetingAt(store);
    };
  }
  // The threads hold so many references beside this object.
  [[nodiscard]] size_t others() const { return store.use_count() - 1; }
};

// Returns whether a thread that still goes on finds the attempt ended.
bool expectNoAnswer(const SilentStore& silent, uint16_t port, milliseconds timeout) {
  ChangeAttempt attempt;
  try {
    meetInTime(silent.meet(), memberAt(port), timeout, Clock::now() + timeout, attempt);
    ADD_FAILURE() << "it does not answer";
  } catch (const c10::DistBackendError& error) {
    EXPECT_NE(std::string(error.what()).find("bagua:000003:0123456789abcdef:"), std::string::npos) << error.what();
  }
  return attempt.hasEnded();
}

TEST(MeetInTime, ReturnsAndThrowsWhatTheThreadDoes) {
  ChangeAttempt attempt;
  const auto deadline = Clock::now() + seconds(60);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto met = meetInTime([&] { return meetingAt(store); }, memberAt(1), seconds(60), deadline, attempt);
  EXPECT_EQ(met.store, store);
  const auto refuse = []() -> Meeting { TORCH_CHECK_VALUE(false, "they differ"); };
  EXPECT_THROW(meetInTime(refuse, memberAt(1), seconds(60), deadline, attempt), c10::ValueError);
}

TEST(MeetInTime, GivesUpAThreadThatEndsByItselfWhenItIsAnswered) {
  SilentStore silent;
  const auto begun = Clock::now();
  EXPECT_TRUE(expectNoAnswer(silent, 2, milliseconds(100)));
  EXPECT_LT(Clock::now() - begun, seconds(5));
  EXPECT_EQ(silent.others(), 1);
  silent.answers.set_value();
  for (const auto end = Clock::now() + seconds(10); silent.others() != 0 && Clock::now() < end;) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_EQ(silent.others(), 0) << "a result that comes too late is destroyed";
}

TEST(MeetInTime, EndsWithTheAttempt) {
  SilentStore silent;
  ChangeAttempt attempt;
  auto aborts = std::async(std::launch::async, [&] {
    std::this_thread::sleep_for(milliseconds(100));
    attempt.end("was aborted");
    attempt.end("was shut down");
    return Clock::now();
  });
  try {
    meetInTime(silent.meet(), memberAt(3), seconds(60), Clock::now() + seconds(60), attempt);
    FAIL() << "it does not answer";
  } catch (const c10::DistBackendError& error) {
    EXPECT_NE(std::string(error.what()).find("the group was aborted while"), std::string::npos) << error.what();
  }
  EXPECT_LT(Clock::now() - aborts.get(), seconds(2));
  silent.answers.set_value();
}

TEST(MeetInTime, HasFewThreadsWaitForOneAddressAndWaitsWithoutOneThen) {
  SilentStore silent;
  for (int change = 0; change < 6; ++change) expectNoAnswer(silent, 4, milliseconds(10));
  EXPECT_EQ(silent.others(), 4);
  SilentStore other;
  expectNoAnswer(other, 5, milliseconds(10));
  EXPECT_EQ(other.others(), 1);
  other.answers.set_value();
  // One that is answered makes room.
  ChangeAttempt attempt;
  auto answers = std::async(std::launch::async, [&] {
    std::this_thread::sleep_for(milliseconds(100));
    silent.answers.set_value();
  });
  const auto met = meetInTime(silent.meet(), memberAt(4), seconds(60), Clock::now() + seconds(60), attempt);
  EXPECT_EQ(met.store, silent.store);
  answers.get();
}

TEST(ChangeStore, MayAnswerUntilTheDeadlineOrForItsOwnTimeoutWhicheverIsLonger) {
  for (const auto own : {milliseconds(20), milliseconds(60000)}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    store->setTimeout(own);
    auto sets = std::async(std::launch::async, [&] {
      std::this_thread::sleep_for(milliseconds(200));
      store->set("epoch/begun", std::vector<uint8_t>(3));
    });
    const auto deadline = Clock::now() + (own < seconds(1) ? milliseconds(60000) : milliseconds(1));
    {
      ChangeStore part("epoch", store, deadline, std::make_shared<ChangeAttempt>());
      EXPECT_EQ(part.get("begun").size(), 3);
    }
    sets.get();
    EXPECT_EQ(store->getTimeout(), own);
  }
}

}  // namespace
}  // namespace bagua
