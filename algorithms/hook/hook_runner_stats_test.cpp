// SPDX-License-Identifier: Apache-2.0
// Figures that another thread asks for, and programs that another thread still runs.
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

#include "algorithms/hook/hook_runner.h"
#include "algorithms/registry.h"
#include "tests/support/immediate_group.h"

namespace bagua {
namespace {

// What happens to the one algorithm of this test.
struct Life {
  std::promise<void> isAsked;
  std::shared_future<void> mayAnswer;
  std::atomic<bool> hasEnded = false;
};

Life*& life() {
  static Life* current = nullptr;
  return current;
}

// Takes its time to say what it keeps.
class Slow final : public Algorithm, public KeepsState {
 public:
  Slow() = default;
  ~Slow() override { life()->hasEnded = true; }
  Slow(const Slow&) = delete;
  Slow& operator=(const Slow&) = delete;

  void reduce(Bucket& /*bucket*/, Communicator& /*communicator*/) override {}
  [[nodiscard]] int64_t stateBytes() const override {
    life()->isAsked.set_value();
    life()->mayAnswer.wait();
    return life()->hasEnded ? -1 : 42;
  }
  [[nodiscard]] AlgorithmState state() const override { return {}; }
  void load(const AlgorithmState& /*state*/, StepContext& /*context*/) override {}
};

TEST(HookRunner, AnAlgorithmOutlivesAThreadThatAsksForItsFigures) {
  Life own;
  std::promise<void> answer;
  own.mayAnswer = answer.get_future().share();
  life() = &own;
  HookRunner runner("slow", {}, std::make_shared<testing::ImmediateGroup>(), {at::zeros({3})});
  int64_t bytes = 0;
  std::thread monitor([&] { bytes = runner.stats().stateBytes; });
  own.isAsked.get_future().wait();
  // Not held up by the monitor.
  runner.leave({});
  answer.set_value();
  monitor.join();
  EXPECT_EQ(bytes, 42);
  EXPECT_TRUE(own.hasEnded);
  EXPECT_EQ(runner.stats().stateBytes, 0) << "of plain averaging, which took over";
}

TEST(HookLedger, IsLentAsLongAsAProgramLives) {
  constexpr std::chrono::milliseconds kSoon{10};
  const auto ledger = std::make_shared<HookLedger>();
  EXPECT_TRUE(ledger->waitForPrograms(kSoon));
  auto program = ledger->lend();
  auto copy = program;
  program.reset();
  EXPECT_FALSE(ledger->waitForPrograms(kSoon));
  std::thread other([&] { copy.reset(); });
  EXPECT_TRUE(ledger->waitForPrograms(std::chrono::seconds(20)));
  other.join();
}

TEST(HookRunner, GoesOnAmongOtherMembersWhenNoProgramOfTheFormerCanTouchAGradient) {
  const auto group = std::make_shared<testing::ImmediateGroup>();
  const at::Tensor parameter = at::zeros({3});
  HookRunner runner("gradient_allreduce", {}, group, {parameter});
  const std::vector<BucketEntry> entries{{.parameter = 0, .gradient = at::zeros({3}), .isUsed = true}};
  const auto reduce = [&] { runner.reduceBucket(at::zeros({3}), entries, /*isFirst=*/true, /*isLast=*/true); };
  reduce();
  // Its members have nothing to agree on any more, which this group could not do.
  runner.leave({});
  ++group->number;
  auto next = std::async(std::launch::async, reduce);
  EXPECT_EQ(next.wait_for(std::chrono::milliseconds(200)), std::future_status::timeout);
  // The other thread goes on as the program is destroyed, and adds its own to the group's.
  std::exchange(group->programs, {}).clear();
  next.get();
  EXPECT_EQ(runner.step(), 2);
}

}  // namespace

BAGUA_REGISTER_ALGORITHM({
    .name = "slow",
    .summary = "For this test.",
    .create = [](const Options& /*options*/) { return std::make_unique<Slow>(); },
})

}  // namespace bagua
