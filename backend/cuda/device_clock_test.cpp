// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/device_clock.h"

#include <gtest/gtest.h>

namespace bagua {
namespace {

class DeviceClockTest : public ::testing::Test {
 protected:
  struct FakeEvent final : DeviceEvent {
    explicit FakeEvent(DeviceClockTest& test) : test(test) {}
    ~FakeEvent() override { --test.alive_; }
    bool record() override {
      place = test.place_;
      return test.isRecording_;
    }
    [[nodiscard]] bool hasCome() const override { return test.progress_ >= place; }
    [[nodiscard]] double secondsSince(const DeviceMoment& earlier) const override {
      return place - dynamic_cast<const FakeEvent&>(earlier).place;
    }
    DeviceClockTest& test;
    int place = 0;
  };

  Moment at(int place) {
    place_ = place;
    auto moment = clock_->now();
    EXPECT_TRUE(moment);
    return *moment;
  }

  int alive_ = 0;
  int made_ = 0;
  int place_ = 0;
  int progress_ = 0;
  bool isRecording_ = true;
  std::optional<DeviceClock> clock_{[this]() -> std::unique_ptr<DeviceEvent> {
    ++alive_;
    ++made_;
    return std::make_unique<FakeEvent>(*this);
  }};
};

TEST_F(DeviceClockTest, TellsTheTimeBetweenTwoPlacesOfTheDevicesWork) {
  const Moment begin = at(3);
  const Moment end = at(8);
  progress_ = 7;
  EXPECT_TRUE(begin.hasCome());
  EXPECT_FALSE(end.hasCome());
  progress_ = 8;
  EXPECT_TRUE(end.hasCome());
  EXPECT_EQ(end.secondsSince(begin), 5);
}

TEST_F(DeviceClockTest, UsesEventsAgainThatNobodyNeeds) {
  for (int i = 0; i < 100; ++i) {
    const Moment begin = at(2 * i);
    const Moment end = at(2 * i + 1);
  }
  EXPECT_EQ(made_, 2);
}

TEST_F(DeviceClockTest, HasRoomForAsManyMomentsAsMayBeInUse) {
  std::vector<Moment> inUse;
  while (clock_->hasRoom()) inUse.push_back(at(0));
  EXPECT_EQ(inUse.size(), DeviceClock::kMostMoments);
  inUse.pop_back();
  EXPECT_TRUE(clock_->hasRoom());
}

TEST_F(DeviceClockTest, TellsNothingWhereNothingCanBeRecorded) {
  isRecording_ = false;
  EXPECT_FALSE(clock_->now());
  EXPECT_TRUE(clock_->hasRoom());
  EXPECT_EQ(alive_, 0);
}

TEST_F(DeviceClockTest, ItsMomentsOutliveIt) {
  {
    const Moment moment = at(1);
    clock_.reset();
    progress_ = 1;
    EXPECT_TRUE(moment.hasCome());
  }
  EXPECT_EQ(alive_, 0);
}

}  // namespace
}  // namespace bagua
