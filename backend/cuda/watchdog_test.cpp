// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/watchdog.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <future>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace bagua {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::NiceMock;
using ::testing::Return;

constexpr milliseconds kLongTimeout{60000};
constexpr milliseconds kShortTimeout{50};

// A work whose device is played by the test.
class FakeWork final : public WatchedWork {
 public:
  FakeWork(uint64_t sequence, milliseconds timeout) {
    operation_.name = "bagua:all_reduce";
    operation_.dtype = at::kFloat;
    operation_.numel = 1024;
    operation_.sequence = sequence;
    operation_.timeout = timeout;
  }

  const Operation& operation() const override { return operation_; }
  bool deviceDone() const override {
    if (isDeviceLost) throw std::runtime_error("an illegal memory access");
    return isDeviceDone;
  }
  void fail(const std::exception_ptr& error) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (message_.empty()) message_ = messageOf(error);
    cv_.notify_all();
  }
  void retire() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    isRetired_ = true;
    cv_.notify_all();
  }

  // Waits for the failure.
  std::string failure() {
    std::unique_lock<std::mutex> lock(mutex_);
    cv_.wait_for(lock, kLongTimeout, [this] { return !message_.empty(); });
    return message_;
  }
  bool hasFailed() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return !message_.empty();
  }
  bool waitRetired() {
    std::unique_lock<std::mutex> lock(mutex_);
    return cv_.wait_for(lock, kLongTimeout, [this] { return isRetired_; });
  }

  std::atomic<bool> isDeviceDone = false;
  std::atomic<bool> isDeviceLost = false;

 private:
  Operation operation_;
  std::string message_;
  bool isRetired_ = false;
};

class MockTransport : public WatchedTransport {
 public:
  MOCK_METHOD(std::string, asyncError, (), (override));
  MOCK_METHOD(void, abort, (), (override));
};

class WatchdogTest : public ::testing::Test {
 protected:
  c10::intrusive_ptr<FakeWork> watched(uint64_t sequence, milliseconds timeout) {
    auto work = c10::make_intrusive<FakeWork>(sequence, timeout);
    watchdog_->watch(work);
    return work;
  }

  std::shared_ptr<NiceMock<MockTransport>> transport_ = std::make_shared<NiceMock<MockTransport>>();
  std::atomic<int> prepared_ = 0;
  std::unique_ptr<Watchdog> watchdog_ =
      std::make_unique<Watchdog>(GroupIdentity{"trainers", 1, 4}, transport_, [this] { ++prepared_; });
};

TEST_F(WatchdogTest, AMessageHasNoPlaceInTheOrderOfPrograms) {
  ::setenv("TORCH_FR_DUMP_ON_TIMEOUT", "0", 1);  // a failure on purpose leaves no file
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const GroupIdentity absent{"trainers", 0, 2};
  const GroupIdentity waiting{"trainers", 1, 2};
  GroupHealth healthOfAbsent(absent, store);
  GroupHealth healthOfWaiting(waiting, store);
  Watchdog watchdog(
      absent, transport_, [] {}, healthOfAbsent.addLog("cuda"));
  const auto message = c10::make_intrusive<FakeWork>(7, kLongTimeout);
  message->isDeviceDone = true;
  watchdog.watch(message, OperationLog::Kind::kMessage);
  ASSERT_TRUE(watchdog.waitIdle(kLongTimeout));

  std::promise<std::string> cause;
  const auto log = healthOfWaiting.addLog("cuda");
  log->onFailure([&cause](const std::string& text) { cause.set_value(text); });
  Operation program{.name = "all_reduce", .timeout = milliseconds(1500)};
  program.sequence = 7;
  log->begin(program);
  EXPECT_THAT(cause.get_future().get(), HasSubstr("Not there: rank 0"));
  healthOfWaiting.stop();
}

TEST_F(WatchdogTest, RetiresAWorkWhenTheDeviceIsDone) {
  const auto work = watched(0, kLongTimeout);
  EXPECT_FALSE(watchdog_->waitIdle(kShortTimeout));
  work->isDeviceDone = true;
  EXPECT_TRUE(watchdog_->waitIdle(kLongTimeout));
  EXPECT_TRUE(work->waitRetired());
  EXPECT_FALSE(work->hasFailed());
  EXPECT_FALSE(watchdog_->error());
  EXPECT_EQ(prepared_, 1);
}

TEST_F(WatchdogTest, TimeoutFailsEverythingThatIsNotDoneAndAbortsOnce) {
  EXPECT_CALL(*transport_, abort()).Times(1);
  const auto late = watched(12, kShortTimeout);
  const auto other = watched(13, kLongTimeout);
  EXPECT_THAT(late->failure(),
              AllOf(HasSubstr("bagua:all_reduce #12 (Float[1024]) on rank 1 of 4, group 'trainers' timed out"),
                    HasSubstr("timeout of 50 ms"), HasSubstr("2 operation(s)"), HasSubstr("in the same order")));
  EXPECT_THAT(other->failure(), AllOf(HasSubstr("#13"), HasSubstr("#12")));
  EXPECT_THAT(messageOf(watchdog_->error()), HasSubstr("timed out"));
  EXPECT_FALSE(watchdog_->isIdle()) << "the device still holds on to the tensors";
  late->isDeviceDone = other->isDeviceDone = true;
  EXPECT_TRUE(watchdog_->waitIdle(kLongTimeout));
}

TEST_F(WatchdogTest, ErrorOfTheTransportIsThatOfTheOldestWork) {
  ON_CALL(*transport_, asyncError()).WillByDefault(Return("remote process exited"));
  EXPECT_CALL(*transport_, abort()).Times(1);
  const auto work = watched(7, kLongTimeout);
  EXPECT_THAT(work->failure(), AllOf(HasSubstr("bagua:all_reduce #7"), HasSubstr("remote process exited")));
  work->isDeviceDone = true;
}

TEST_F(WatchdogTest, LostDeviceFailsItsWorksAndLetsGoOfThem) {
  EXPECT_CALL(*transport_, abort()).Times(1);
  const auto work = watched(3, kLongTimeout);
  work->isDeviceLost = true;
  EXPECT_THAT(work->failure(), AllOf(HasSubstr("#3"), HasSubstr("an illegal memory access")));
  EXPECT_TRUE(work->waitRetired());
}

TEST_F(WatchdogTest, FailureSparesWhatIsDone) {
  const auto done = c10::make_intrusive<FakeWork>(0, kLongTimeout);
  done->isDeviceDone = true;
  watchdog_->watch(done);
  const auto pending = watched(1, kLongTimeout);
  watchdog_->fail(std::make_exception_ptr(std::runtime_error("asked to stop")));
  EXPECT_THAT(pending->failure(), HasSubstr("asked to stop"));
  EXPECT_FALSE(done->hasFailed());
  pending->isDeviceDone = true;
}

TEST_F(WatchdogTest, FirstFailureWins) {
  EXPECT_CALL(*transport_, abort()).Times(1);
  watchdog_->fail(std::make_exception_ptr(std::runtime_error("first")));
  watchdog_->fail(std::make_exception_ptr(std::runtime_error("second")));
  EXPECT_EQ(messageOf(watchdog_->error()), "first");
}

TEST_F(WatchdogTest, WorkThatComesAfterAFailureFailsAtOnce) {
  watchdog_->fail(std::make_exception_ptr(std::runtime_error("asked to stop")));
  const auto work = watched(5, kLongTimeout);
  EXPECT_THAT(work->failure(), AllOf(HasSubstr("#5"), HasSubstr("asked to stop")));
  work->isDeviceDone = true;
}

TEST_F(WatchdogTest, FailureOfTheAbortIsSurvived) {
  ON_CALL(*transport_, abort()).WillByDefault([] { throw std::runtime_error("no"); });
  const auto work = watched(0, kShortTimeout);
  EXPECT_THAT(work->failure(), HasSubstr("timed out"));
  work->isDeviceDone = true;
  EXPECT_TRUE(watchdog_->waitIdle(kLongTimeout));
}

TEST_F(WatchdogTest, ThreadThatCannotStartFailsTheWorks) {
  watchdog_ = std::make_unique<Watchdog>(GroupIdentity{"trainers", 1, 4}, transport_,
                                         [] { throw std::runtime_error("no such device"); });
  const auto work = watched(0, kLongTimeout);
  EXPECT_THAT(work->failure(), AllOf(HasSubstr("could not start"), HasSubstr("no such device")));
  work->isDeviceDone = true;
}

TEST_F(WatchdogTest, StopDoesNotWaitForTheDeviceButTheThreadDoes) {
  const auto work = watched(0, kLongTimeout);
  watchdog_->stop(kShortTimeout);
  watchdog_.reset();
  EXPECT_FALSE(work->hasFailed());
  work->isDeviceDone = true;
  EXPECT_TRUE(work->waitRetired()) << "tensors are released after the watchdog has gone";
}

TEST_F(WatchdogTest, WorksCanBeWatchedAfterAStop) {
  watched(0, kLongTimeout)->isDeviceDone = true;
  watchdog_->stop(kLongTimeout);
  const auto work = watched(1, kLongTimeout);
  work->isDeviceDone = true;
  EXPECT_TRUE(work->waitRetired());
}

}  // namespace
}  // namespace bagua
