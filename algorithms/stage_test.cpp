// SPDX-License-Identifier: Apache-2.0
#include "algorithms/stage.h"

#include <gtest/gtest.h>

namespace bagua {
namespace {

// A device that does one thing a second, and has come as far as `progress` says.
struct FakeDevice final : StageClock {
  struct Place final : DeviceMoment {
    Place(const FakeDevice& device, int place) : device(device), place(place) {}
    [[nodiscard]] bool hasCome() const override { return device.progress >= place; }
    [[nodiscard]] double secondsSince(const DeviceMoment& earlier) const override {
      EXPECT_TRUE(hasCome());
      return place - dynamic_cast<const Place&>(earlier).place;
    }
    const FakeDevice& device;
    const int place;
  };

  std::optional<Moment> now() override {
    if (enqueued > last) return std::nullopt;
    return Moment{.onCpu = {}, .onDevice = std::make_shared<const Place>(*this, enqueued)};
  }

  int enqueued = 0;
  int progress = 0;
  // The clock tells nothing after it.
  int last = 1000;
};

class StagesOnADevice : public ::testing::Test {
 protected:
  // Codes for `coding` seconds, for as long again after `network` seconds on the network.
  StageSeconds program(int coding, int network) {
    const StageClock::Scope timed(device_);
    StageSeconds seconds;
    {
      const Elapsed exchange(seconds, "exchange", {"compress", "reduce"});
      {
        const Stage stage(seconds, "compress");
        device_.enqueued += coding;
      }
      device_.enqueued += network;
      const Stage stage(seconds, "reduce");
      device_.enqueued += coding;
    }
    return seconds;
  }

  FakeDevice device_;
  StageSeconds all_;
};

using Totals = StageSeconds::Totals;

TEST_F(StagesOnADevice, TellNetworkFromCoding) {
  auto seconds = program(2, 10);
  all_.take(seconds);
  device_.progress = device_.enqueued;
  EXPECT_EQ(all_.totals(), (Totals{{"compress", 2}, {"reduce", 2}, {"exchange", 10}}));
}

TEST_F(StagesOnADevice, CountWithTheLastOfTheirProgram) {
  for (int i = 0; i < 2; ++i) {
    auto seconds = program(1, 5);
    all_.take(seconds);
  }
  device_.progress = 6;  // the first program still reduces
  EXPECT_EQ(all_.totals(), Totals());
  device_.progress = 8;
  EXPECT_EQ(all_.totals(), (Totals{{"compress", 1}, {"reduce", 1}, {"exchange", 5}}));
  device_.progress = 14;
  EXPECT_EQ(all_.totals(), (Totals{{"compress", 2}, {"reduce", 2}, {"exchange", 10}}));
}

TEST_F(StagesOnADevice, OfABucketCountWithItsProgram) {
  StageSeconds whole;
  auto bucket = program(1, 5);
  whole.take(bucket);
  {
    const StageClock::Scope timed(device_);
    const Stage stage(whole, "check");
    device_.enqueued += 3;
  }
  all_.take(whole);
  device_.progress = 7;
  EXPECT_EQ(all_.totals(), Totals());
  device_.progress = 10;
  EXPECT_EQ(all_.totals(), (Totals{{"compress", 1}, {"reduce", 1}, {"exchange", 5}, {"check", 3}}));
}

TEST_F(StagesOnADevice, ThatAreUnderWayAtAResetCountAfterIt) {
  auto done = program(1, 1);
  all_.take(done);
  device_.progress = device_.enqueued;
  auto underWay = program(2, 2);
  all_.take(underWay);
  all_.reset();
  EXPECT_EQ(all_.totals(), Totals());
  device_.progress = device_.enqueued;
  EXPECT_EQ(all_.totals(), (Totals{{"compress", 2}, {"reduce", 2}, {"exchange", 2}}));
}

TEST_F(StagesOnADevice, OfWhichNobodyAsksAreAddedUpAsTheyCome) {
  device_.last = 1'000'000;
  for (int i = 0; i < 1000; ++i) {
    auto seconds = program(2, 2);
    all_.take(seconds);
    device_.progress = device_.enqueued;
  }
  EXPECT_LE(all_.waiting(), 65);
}

TEST_F(StagesOnADevice, WithoutAnEndDoNotCount) {
  device_.last = 2;  // the end of "compress", and nothing behind it
  auto seconds = program(2, 10);
  all_.take(seconds);
  device_.progress = device_.enqueued;
  EXPECT_EQ(all_.totals(), (Totals{{"compress", 2}}));
}

TEST_F(StagesOnADevice, AreNotTimedWithoutAClock) {
  const StageClock::Scope untimed(StageClock::none());
  StageSeconds seconds;
  { const Stage stage(seconds, "compress"); }
  all_.take(seconds);
  EXPECT_EQ(all_.totals(), Totals());
}

TEST(StagesOnTheHost, CountAtOnceAndTheOuterOneWithoutTheInnerOnes) {
  constexpr auto kPause = std::chrono::milliseconds(20);
  const auto pause = [&] {
    const auto end = std::chrono::steady_clock::now() + kPause;
    while (std::chrono::steady_clock::now() < end) {
    }
  };
  StageSeconds seconds;
  const auto begin = std::chrono::steady_clock::now();
  {
    const Elapsed outer(seconds, "exchange", {"compress"});
    {
      const Stage inner(seconds, "compress");
      pause();
    }
    pause();
  }
  const double whole = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  StageSeconds all;
  all.take(seconds);
  Totals totals = all.totals();
  EXPECT_GE(totals["compress"], 0.02);
  EXPECT_GE(totals["exchange"], 0.02);
  EXPECT_LE(totals["compress"] + totals["exchange"], whole);
}

}  // namespace
}  // namespace bagua
