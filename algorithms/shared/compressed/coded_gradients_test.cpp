// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/coded_gradients.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
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

// Parameter 0 has one dimension and no elements.
void reduceOnce(Algorithm& algorithm, Communicator& communicator) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(communicator.rank());
  const at::Tensor flat = at::randn({4096}, generator);
  Bucket bucket{.flat = flat, .entries = {{0, flat.narrow(0, 0, 0)}, {1, flat.view({64, 64})}}};
  algorithm.reduce(bucket, communicator);
}

TEST(CodedGradients, WhatHasNoElementsIsNotLookedAt) {
  testing::runRanks(2, [](Communicator& communicator) {
    const auto algorithm = create("1d=int8, *=4bit", "warn");
    reduceOnce(*algorithm, communicator);
    EXPECT_EQ(algorithm->as<IsGuarded>()->guard().report().looks, 1);
  });
}

TEST(CodedGradients, FeedbackIsReadyForTheCodecsToWhichTheGuardMayRaise) {
  testing::runRanks(2, [](Communicator& communicator) {
    const auto algorithm = create("*=1bit", "adapt");
    // Parameter 1 by two levels: 2 bits, 4 bits, of which "auto" wants feedback for the second.
    algorithm->as<IsGuarded>()->guard().load(at::tensor({1, 2, 0, 1000, 0, 0, 0, 0, 0, 0, 0}, at::kLong).unsqueeze(0));
    reduceOnce(*algorithm, communicator);
    EXPECT_TRUE(algorithm->as<KeepsState>()->state().contains("sender.4bit.1"));
  });
}

TEST(CodedGradients, ResidualsAreKeptWhereAnyCodecHasFeedback) {
  EXPECT_FALSE(create("*=int8", "adapt")->as<KeepsResiduals>()->keepsAny());
  EXPECT_TRUE(create("1d=int8, *=4bit", "warn")->as<KeepsResiduals>()->keepsAny());
}

}  // namespace
}  // namespace bagua::compressed
