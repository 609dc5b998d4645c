// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/coded_gradients.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "algorithms/registry.h"
#include "tests/support/thread_ranks.h"

namespace bagua::compressed {
namespace {

std::unique_ptr<Algorithm> create(const std::string& codec, const std::string& guard) {
  const auto& info = AlgorithmRegistry::find("quantized_allreduce");
  return info.create(Options(info.name, info.options,
                             {{"codec", codec}, {"guard", guard}, {"exact", std::string()}, {"hierarchical", false}}));
}

at::Tensor gradientsOf(const Communicator& communicator) {
  return at::randn({4096}, at::make_generator<at::CPUGeneratorImpl>(communicator.rank()));
}

// Parameter 0 has one dimension and no elements.
void reduceOnce(Algorithm& algorithm, Communicator& communicator, const at::Tensor& flat, int64_t step = 0) {
  Bucket bucket{.flat = flat, .entries = {{0, flat.narrow(0, 0, 0)}, {1, flat.view({64, 64})}}, .step = step};
  algorithm.reduce(bucket, communicator);
}

// After three steps with gradients as `change` makes them of normal numbers.
Guard::Report reportOf(Algorithm& algorithm, Communicator& communicator,
                       const std::function<at::Tensor(const at::Tensor&)>& change) {
  for (int64_t step = 0; step < 3; ++step) {
    reduceOnce(algorithm, communicator, change(gradientsOf(communicator)), step);
  }
  return algorithm.as<IsGuarded>()->guard().report();
}

TEST(CodedGradients, WhatHasNoElementsIsNotLookedAt) {
  testing::runRanks(2, [](Communicator& communicator) {
    const auto algorithm = create("1d=int8, *=4bit", "warn");
    reduceOnce(*algorithm, communicator, gradientsOf(communicator));
    EXPECT_EQ(algorithm->as<IsGuarded>()->guard().report().looks, 1);
  });
}

// The norms of what is looked at travel, too.
TEST(CodedGradients, GradientsWhoseSquaresNoFloatHoldsAreNoLostStep) {
  testing::runRanks(2, [](Communicator& communicator) {
    const auto algorithm = create("*=4bit", "warn");
    const auto report = reportOf(*algorithm, communicator, [](const at::Tensor& normal) { return normal * 1e25; });
    EXPECT_TRUE(algorithm->as<KeepsState>()->state().at("sender.4bit.1").ne(0).any().item<bool>());
    EXPECT_EQ(report.alarms, 0);
  });
}

TEST(CodedGradients, OutliersWhoseSquaresNoFloatHoldsAreFound) {
  testing::runRanks(2, [](Communicator& communicator) {
    const auto algorithm = create("*=4bit", "warn");
    const auto report = reportOf(*algorithm, communicator, [](const at::Tensor& normal) {
      normal.slice(0, 0, std::nullopt, 64).mul_(1e36);
      return normal;
    });
    EXPECT_TRUE(algorithm->as<KeepsState>()->state().at("sender.4bit.1").ne(0).any().item<bool>());
    EXPECT_EQ(report.alarms, 1);
  });
}

// A mean of halves that lie next to zero is rounded far more than any codec would.
TEST(CodedGradients, WhatTheTypeOfGradientsRoundsIsNoAlarm) {
  testing::runRanks(2, [](Communicator& communicator) {
    const auto report = reportOf(*create("*=int8", "warn"), communicator,
                                 [](const at::Tensor& normal) { return (normal * 6e-8).to(at::kHalf); });
    EXPECT_EQ(report.alarms, 0);
  });
}

TEST(CodedGradients, NumbersThatCodecsMakeZerosOfAreNoAlarm) {
  testing::runRanks(2, [](Communicator& communicator) {
    const auto report =
        reportOf(*create("*=int8", "adapt"), communicator, [](const at::Tensor& normal) { return normal * 1e-30; });
    EXPECT_EQ(report.alarms, 0);
    EXPECT_EQ(report.looks, 2);
  });
}

TEST(CodedGradients, FeedbackIsReadyForTheCodecsToWhichTheGuardMayRaise) {
  testing::runRanks(2, [](Communicator& communicator) {
    const auto algorithm = create("*=1bit", "adapt");
    // Parameter 1 by two levels: 2 bits, 4 bits, of which "auto" wants feedback for the second.
    algorithm->as<IsGuarded>()->guard().load(at::tensor({1, 2, 0, 1000, 0, 0, 0, 0, 0, 0, 0}, at::kLong).unsqueeze(0));
    reduceOnce(*algorithm, communicator, gradientsOf(communicator));
    EXPECT_TRUE(algorithm->as<KeepsState>()->state().contains("sender.4bit.1"));
  });
}

TEST(CodedGradients, SparseGradientsAreAveragedWhereTheOthersAre) {
  const auto& info = AlgorithmRegistry::find("quantized_allreduce");
  for (const bool average : {true, false}) {
    const auto algorithm = info.create(Options(info.name, info.options, {{"average", average}}));
    EXPECT_EQ(algorithm->traits().averagesSparse, average);
  }
}

TEST(CodedGradients, ResidualsAreKeptWhereAnyCodecHasFeedback) {
  EXPECT_FALSE(create("*=int8", "adapt")->as<KeepsResiduals>()->keepsAny());
  EXPECT_TRUE(create("1d=int8, *=4bit", "warn")->as<KeepsResiduals>()->keepsAny());
}

}  // namespace
}  // namespace bagua::compressed
