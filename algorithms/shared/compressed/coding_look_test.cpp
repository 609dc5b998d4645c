// SPDX-License-Identifier: Apache-2.0
// The guard's look at differences of weights.
#include "algorithms/shared/compressed/coding_look.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "kernels/device_ways.h"

namespace bagua::compressed {
namespace {

constexpr int64_t kElements = 4000;
// A parameter of so few elements is too small to be looked at.
constexpr int64_t kFew = 300;

at::Tensor random(int64_t elements, int64_t seed) {
  return at::randn({elements}, at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed)));
}

// Normal numbers, of which some are much larger than the others.
at::Tensor withTails(int64_t elements, int64_t seed) {
  const at::Tensor values = random(elements, seed);
  values.slice(0, 0, std::nullopt, 64).mul_(1000);
  return values;
}

BucketEntries entriesOf(const std::vector<at::Tensor>& parts) {
  std::vector<BucketEntry> entries;
  for (const auto& part : parts) entries.push_back({static_cast<int64_t>(entries.size()), part});
  return entries;
}

// Parameters 0 and 4 are sound, 1 is zeros, 2 is too small, and 3 has tails.
std::vector<at::Tensor> partsAt(int64_t step) {
  return {random(kElements, step), at::zeros({kElements}), withTails(kFew, step), withTails(kElements, 100 + step),
          random(kElements, 200 + step)};
}

struct Seen {
  Guard::Report report;
  std::string said;
};

// Returns what a guard makes of three steps. Elements are coded from `begin` on; `residual` is in differences.
Seen seen(const std::string& codec, int64_t begin = 0, double residual = 0) {
  Guard guard(Guard::Mode::kWarn, Guard::Messages::kDifferences);
  guard.useNames({"sound", "zeros", "small", "tailed", "last"});
  ::testing::internal::CaptureStderr();
  for (int64_t step = 0; step < 3; ++step) {
    const auto parts = partsAt(step);
    const at::Tensor flat = at::cat(parts).narrow(0, begin, 4 * kElements + kFew - begin);
    guard.begin({.flat = flat, .step = step}, 0);
    Encoding encoding{.key = bucketKey(0, step, 0)};
    if (residual != 0) encoding.residual = flat * residual;
    CodingLook(flat, begin, entriesOf(parts), codec, encoding).tell(guard, step);
  }
  return {guard.report(), ::testing::internal::GetCapturedStderr()};
}

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (auto place = text.find(part); place != std::string::npos; place = text.find(part, place + 1)) ++found;
  return found;
}

TEST(LookAtDifferences, OfTailsThatACodecDoesNotSuitItSaysWhoseTheyAre) {
  for (const char* const codec : {"int8", "4bit"}) {
    // All of them, and those of a rank that codes from the middle of a parameter on.
    for (const int64_t begin : {int64_t{0}, kElements + 1111}) {
      const auto [report, said] = seen(codec, begin);
      EXPECT_EQ(report.looks, 3);
      EXPECT_EQ(report.alarms, 1) << said;
      EXPECT_EQ(count(said, "'tailed' at step 1: coding with " + std::string(codec) + " loses "), 1U) << said;
      EXPECT_EQ(count(said, "bagua: "), 1U) << said;
      EXPECT_GT(report.worst[0], 0.2);
    }
  }
}

// They are those of larger differences where the learning rate has come down.
TEST(LookAtDifferences, ResidualsAreCountedAndHaveNoLimit) {
  for (const double residual : {1.5, 2.5}) {
    const auto [report, said] = seen("4bit", 0, residual);
    EXPECT_EQ(count(said, "error feedback"), 0U) << said;
    EXPECT_NEAR(report.worst[2], residual * residual, 1e-3);
  }
}

TEST(LookAtDifferences, WhatIsSoundIsLeftInPeace) {
  for (const bool isOnDevice : {false, true}) {
    const std::optional<AsOnDevice> onDevice = isOnDevice ? std::make_optional<AsOnDevice>() : std::nullopt;
    for (const auto& codec : CodecRegistry::names()) {
      Guard guard(Guard::Mode::kWarn, Guard::Messages::kDifferences);
      for (int64_t step = 0; step < 4; ++step) {
        const std::vector<at::Tensor> parts = {random(kElements, step), at::zeros({kElements}), random(kElements, 9)};
        guard.begin({.flat = parts[0], .step = step}, 0);
        CodingLook(at::cat(parts), 0, entriesOf(parts), codec, {.key = bucketKey(0, step, 0)}).tell(guard, step);
      }
      EXPECT_EQ(guard.report().alarms, 0) << codec;
      EXPECT_EQ(guard.report().looks, 4) << codec;
    }
  }
}

TEST(LookAtDifferences, WithoutParametersOfSomeSizeThereIsNoLook) {
  Guard guard(Guard::Mode::kWarn, Guard::Messages::kDifferences);
  const at::Tensor few = random(kFew, 0);
  CodingLook(few, 0, entriesOf({few}), "4bit", {}).tell(guard, 0);
  CodingLook(few.narrow(0, 0, 0), 0, entriesOf({few}), "4bit", {}).tell(guard, 0);
  EXPECT_EQ(guard.report().looks, 0);
}

}  // namespace
}  // namespace bagua::compressed
