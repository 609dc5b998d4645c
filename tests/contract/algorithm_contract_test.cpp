// SPDX-License-Identifier: Apache-2.0
// What every registered algorithm promises, on threads as ranks: on CPU tensors, and on CPU tensors that go the ways of
// a device.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <optional>

#include "algorithms/algorithm_interfaces.h"
#include "algorithms/registry.h"
#include "kernels/codec.h"
#include "kernels/device_ways.h"
#include "tests/support/device_program.h"
#include "tests/support/immediate_steps.h"
#include "tests/support/thread_ranks.h"

namespace bagua {
namespace {

using Hosts = std::vector<std::string>;

struct Case {
  std::string algorithm;
  Hosts hosts;
  bool isAsOnDevice;
};

std::vector<Case> casesOfEveryAlgorithm() {
  const std::vector<Hosts> layouts = {{"a"},
                                      {"a", "b"},
                                      {"a", "b", "c"},
                                      {"a", "a", "b", "b"},
                                      {"a", "a", "a", "b"},
                                      {"a", "b", "b", "a"},
                                      {"a", "b", "b", "c", "c", "c"}};
  std::vector<Case> cases;
  for (const auto& name : AlgorithmRegistry::names()) {
    for (const auto& hosts : layouts) cases.push_back({name, hosts, false});
    for (const auto& hosts : {layouts[1], layouts[4], layouts[6]}) cases.push_back({name, hosts, true});
  }
  return cases;
}

std::string nameOf(const Case& it) {
  std::string name = it.algorithm + "_on";
  for (const auto& host : it.hosts) name += "_" + host;
  return name + (it.isAsOnDevice ? "_as_on_a_device" : "");
}

// Two gradients, one of them a matrix whose columns lie one after another, as DDP hands over that of a transposed
// weight.
Bucket bucketOf(const at::Tensor& flat, int64_t step = 0) {
  const int64_t rows = flat.numel() / 4;
  const at::Tensor vector = flat.narrow(0, 0, flat.numel() - 2 * rows);
  const at::Tensor matrix = flat.narrow(0, vector.numel(), 2 * rows).view({2, rows}).t();
  return {.flat = flat, .entries = {{1, vector}, {0, matrix}}, .step = step, .key = bucketKey(0, step, 1)};
}

// GoogleTest looks for this name.
// NOLINTNEXTLINE(readability-identifier-naming)
void PrintTo(const Case& it, std::ostream* stream) { *stream << nameOf(it); }

class AlgorithmContract : public ::testing::TestWithParam<Case> {
 protected:
  AlgorithmContract() {
    if (GetParam().isAsOnDevice) asOnDevice_.emplace();
  }

  [[nodiscard]] static const AlgorithmInfo& info() { return AlgorithmRegistry::find(GetParam().algorithm); }
  [[nodiscard]] static std::unique_ptr<Algorithm> create() {
    // Rounds that come within the few steps of a test.
    std::map<std::string, OptionValue> given;
    for (const auto& option : info().options) {
      if (option.name == "sync_every") given.emplace(option.name, int64_t{4});
      if (option.name == "fragments") given.emplace(option.name, int64_t{1});
      if (option.name == "delay") given.emplace(option.name, int64_t{0});
    }
    return info().create(Options(info().name, info().options, given));
  }
  [[nodiscard]] int size() const { return static_cast<int>(GetParam().hosts.size()); }

  // The gradients of every rank after one bucket.
  std::vector<at::Tensor> reduce(const std::vector<at::Tensor>& gradients) const {
    std::vector<at::Tensor> results(size());
    testing::runRanks(
        size(),
        [&](Communicator& communicator) {
          const auto algorithm = create();
          Bucket bucket = bucketOf(gradients[communicator.rank()].clone());
          testing::runProgram(bucket.flat.device(), communicator,
                              [&](Communicator& ofProgram) { algorithm->reduce(bucket, ofProgram); });
          results[communicator.rank()] = bucket.flat;
        },
        GetParam().hosts);
    return results;
  }

  [[nodiscard]] std::vector<at::Tensor> randomGradients(int64_t numel, at::ScalarType dtype) const {
    at::manual_seed(17);
    std::vector<at::Tensor> gradients;
    for (int rank = 0; rank < size(); ++rank) gradients.push_back(at::randn({numel}).to(dtype));
    return gradients;
  }

 private:
  std::optional<AsOnDevice> asOnDevice_;
};

// Some promises are made by algorithms that reduce gradients, others by those that average weights.
#define BAGUA_NEEDS(kind) \
  if (info().agreement != Agreement::kind) GTEST_SKIP() << "not promised by algorithms of another kind"

TEST_P(AlgorithmContract, RanksHoldIdenticalGradients) {
  BAGUA_NEEDS(kIdentical);
  // 1: fewer elements than ranks. 37, 1001: no rank count divides them.
  for (const int64_t numel : {1, 37, 1001, 70001}) {
    for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
      const auto results = reduce(randomGradients(numel, dtype));
      for (const auto& result : results) {
        EXPECT_TRUE(at::equal(result, results[0])) << numel << " elements of " << at::toString(dtype);
      }
    }
  }
}

TEST_P(AlgorithmContract, GradientsAreCloseToTheirMean) {
  BAGUA_NEEDS(kIdentical);
  // The longer ones travel in pieces; of the last, cut into three, the last chunk ends just before a piece does.
  for (const int64_t length : {1001, 50'003, 71'905}) {
    const auto gradients = randomGradients(length, at::kDouble);
    at::Tensor mean = gradients[0].clone();
    for (int rank = 1; rank < size(); ++rank) mean += gradients[rank];
    mean /= size();
    // Two codings, each off by at most half of relativeError; normal values span less than 10 here.
    const double bound = 2 * 0.5 * 10.0 * info().relativeError;
    for (const auto& result : reduce(gradients)) EXPECT_LE((result - mean).abs().max().item<double>(), bound);
  }
}

TEST_P(AlgorithmContract, EqualGradientsStayWhatTheyAre) {
  BAGUA_NEEDS(kIdentical);
  constexpr float kValue = 0.37F;
  // Two codings: a scale in fewer bits than the value leaves a constant off by a part of a code.
  const bool isCoded = std::ranges::any_of(info().options, [](const auto& option) { return option.name == "codec"; });
  const double bound = isCoded ? 2 * 0.5 * kValue * info().relativeError : 1e-6;
  for (const auto& result : reduce(std::vector<at::Tensor>(size(), at::full({513}, kValue)))) {
    EXPECT_LE((result - kValue).abs().max().item<double>(), bound);
  }
}

TEST_P(AlgorithmContract, AnInfinityOnOneRankReachesAll) {
  BAGUA_NEEDS(kIdentical);
  // One piece of an exchange, and several.
  for (const int64_t numel : {int64_t{64}, int64_t{50'003}}) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      for (const int64_t position : {int64_t{3}, numel - 1}) {
        auto gradients = randomGradients(numel, dtype);
        gradients.back()[position] = std::numeric_limits<float>::infinity();
        for (const auto& result : reduce(gradients)) {
          EXPECT_FALSE(result.isfinite().all().item<bool>()) << dtype << " " << position << " of " << numel;
        }
      }
    }
  }
}

// Weights that differ on all ranks, in a shape that no number of ranks divides and one with gaps in memory.
std::vector<at::Tensor> weightsOf(int rank) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(101 + rank);
  return {at::randn({37, 3}, generator), at::randn({8, 5}, generator).t().slice(0, 0, 5, 2),
          at::randn({11}, generator).to(at::kBFloat16)};
}

double distance(const std::vector<at::Tensor>& one, const std::vector<at::Tensor>& other) {
  double largest = 0;
  for (size_t i = 0; i < one.size(); ++i) {
    largest = std::max(largest, (one[i] - other[i]).abs().max().item<double>());
  }
  return largest;
}

void takeSteps(ActsOnWeights& algorithm, StepContext& context, int steps) {
  const at::NoGradGuard noGrad;
  for (int step = 0; step < steps; ++step) {
    algorithm.beforeForward(context);
    algorithm.afterBackward(context);
    algorithm.afterStep(context);
  }
}

TEST_P(AlgorithmContract, WeightsAreDrawnTogetherAndEqualAtTheEnd) {
  BAGUA_NEEDS(kEventual);
  std::vector<std::vector<at::Tensor>> weights(size());
  std::vector<std::vector<at::Tensor>> left(size());
  testing::runRanks(
      size(),
      [&](Communicator& communicator) {
        const int rank = communicator.rank();
        weights[rank] = weightsOf(rank);
        testing::ImmediateSteps context(communicator, weights[rank]);
        const auto algorithm = create();
        auto& onWeights = dynamic_cast<ActsOnWeights&>(*algorithm);
        onWeights.useModel(context);
        takeSteps(onWeights, context, 12);
        for (const auto& weight : weights[rank]) left[rank].push_back(weight.clone());
        onWeights.synchronize(context);
      },
      GetParam().hosts);
  for (int rank = 1; rank < size(); ++rank) {
    const double before = distance(weightsOf(rank), weightsOf(0));
    // A ring of three mixes by a third in each step; 8-bit differences and bfloat16 leave less than a hundredth.
    EXPECT_LT(distance(left[rank], left[0]), 0.02 * before);
    EXPECT_EQ(distance(weights[rank], weights[0]), 0);
  }
}

TEST_P(AlgorithmContract, StateContinuesWhereItWasTaken) {
  BAGUA_NEEDS(kEventual);
  testing::runRanks(
      size(),
      [&](Communicator& communicator) {
        std::vector<at::Tensor> weights = weightsOf(communicator.rank());
        testing::ImmediateSteps context(communicator, weights);
        const auto algorithm = create();
        auto& onWeights = dynamic_cast<ActsOnWeights&>(*algorithm);
        onWeights.useModel(context);
        takeSteps(onWeights, context, 3);

        std::vector<at::Tensor> copies;
        for (const auto& weight : weights) copies.push_back(weight.clone());
        testing::ImmediateSteps copiedContext(communicator, copies);
        const auto continued = create();
        auto& continuedOnWeights = dynamic_cast<ActsOnWeights&>(*continued);
        continuedOnWeights.useModel(copiedContext);
        dynamic_cast<KeepsState&>(*continued).load(dynamic_cast<KeepsState&>(*algorithm).state(), copiedContext);

        takeSteps(onWeights, context, 2);
        takeSteps(continuedOnWeights, copiedContext, 2);
        EXPECT_EQ(distance(weights, copies), 0);
      },
      GetParam().hosts);
}

TEST_P(AlgorithmContract, WhatIsNotCodedOnOneHostIsCodedBetweenSeveral) {
  const HostTopology topology(GetParam().hosts);
  if (topology.hostCount() == 1) GTEST_SKIP() << "some code nothing there";
  EXPECT_EQ(create()->whyUncoded(topology), "");
}

INSTANTIATE_TEST_SUITE_P(Every, AlgorithmContract, ::testing::ValuesIn(casesOfEveryAlgorithm()),
                         [](const auto& instance) { return nameOf(instance.param); });

// Between two hosts, the mean of the same gradients in steps 0 and 2, with others between them.
std::pair<at::Tensor, at::Tensor> meansOfTwoSteps(Algorithm& algorithm, Communicator& communicator) {
  std::vector<at::Tensor> means;
  for (int64_t step = 0; step < 3; ++step) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(11 + communicator.rank() + 100 * (step % 2));
    const at::Tensor flat = at::randn({4000}, generator);
    Bucket bucket = bucketOf(flat, step);
    algorithm.reduce(bucket, communicator);
    means.push_back(bucket.flat);
  }
  return {means[0], means[2]};
}

// A CUDA graph repeats the step that it holds in place of others.
TEST(ReplayableAlgorithms, GiveTheSameGradientsTheSameMeanInEveryStep) {
  std::vector<std::pair<std::string, std::map<std::string, OptionValue>>> cases = {{"gradient_allreduce", {}}};
  for (const auto& codec : CodecRegistry::names()) {
    cases.push_back({"bytegrad", {{"codec", codec}}});
    cases.push_back({"quantized_allreduce", {{"codec", codec}}});
    for (const std::string rounding : {"nearest", "stochastic"}) {
      cases.push_back({"quantized_allreduce", {{"codec", codec}, {"error_feedback", false}, {"rounding", rounding}}});
    }
  }
  for (const auto& [name, given] : cases) {
    const auto& info = AlgorithmRegistry::find(name);
    const Options options(name, info.options, given);
    testing::runRanks(2,
                      [&](Communicator& communicator) {
                        const auto algorithm = info.create(options);
                        const auto [first, last] = meansOfTwoSteps(*algorithm, communicator);
                        EXPECT_EQ(at::equal(first, last), algorithm->traits().isReplayable)
                            << name << "(" << options.toString() << ")";
                      },
                      {"a", "b"});
  }
}

// What is known by the name alone has to be true of what is created.
TEST(RegisteredAlgorithms, HaveTheInterfacesThatTheirInfoNames) {
  for (const auto& name : AlgorithmRegistry::names()) {
    SCOPED_TRACE(name);
    const auto& info = AlgorithmRegistry::find(name);
    const auto algorithm = info.create(Options(name, info.options, {}));
    const bool actsOnWeights = algorithm->as<ActsOnWeights>() != nullptr;
    const bool usesMomenta = algorithm->as<UsesMomenta>() != nullptr;
    EXPECT_EQ(actsOnWeights, info.agreement == Agreement::kEventual);
    EXPECT_EQ(info.optimizer, usesMomenta ? "QAdamOptimizer" : actsOnWeights ? "Optimizer" : "");
    EXPECT_EQ(algorithm->as<RunsInBackground>() != nullptr, info.runsInBackground);
    EXPECT_EQ(algorithm->as<CountsSkippedSteps>() != nullptr, info.runsInBackground && !info.stepsMayDiffer);
    EXPECT_TRUE(actsOnWeights || !info.runsInBackground) << "it would not hear of a step";
    EXPECT_TRUE(algorithm->as<KeepsState>() != nullptr || !actsOnWeights) << "its steps would be lost in a checkpoint";
  }
}

TEST(AlgorithmRegistry, AnUnknownNameListsTheRegisteredOnes) {
  try {
    AlgorithmRegistry::find("bytegard");
    FAIL() << "found an algorithm that does not exist";
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find("bytegrad, "), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace bagua
