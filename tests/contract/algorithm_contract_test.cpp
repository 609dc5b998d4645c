// SPDX-License-Identifier: Apache-2.0
// What every registered algorithm promises, on threads as ranks.
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "algorithms/registry.h"
#include "tests/support/thread_ranks.h"

namespace bagua {
namespace {

using Hosts = std::vector<std::string>;

struct Case {
  std::string algorithm;
  Hosts hosts;
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
    for (const auto& hosts : layouts) cases.push_back({name, hosts});
  }
  return cases;
}

std::string nameOf(const ::testing::TestParamInfo<Case>& info) {
  std::string name = info.param.algorithm + "_on";
  for (const auto& host : info.param.hosts) name += "_" + host;
  return name;
}

class AlgorithmContract : public ::testing::TestWithParam<Case> {
 protected:
  [[nodiscard]] int size() const { return static_cast<int>(GetParam().hosts.size()); }

  // The gradients of every rank after one bucket.
  std::vector<at::Tensor> reduce(const std::vector<at::Tensor>& gradients) const {
    const auto& info = AlgorithmRegistry::find(GetParam().algorithm);
    std::vector<at::Tensor> results(size());
    testing::runRanks(
        size(),
        [&](Communicator& communicator) {
          const auto algorithm = info.create(Options(info.name, info.options, {}));
          Bucket bucket{gradients[communicator.rank()].clone()};
          algorithm->reduce(bucket, communicator);
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
};

TEST_P(AlgorithmContract, RanksHoldIdenticalGradients) {
  if (AlgorithmRegistry::find(GetParam().algorithm).agreement != Agreement::kIdentical) {
    GTEST_SKIP() << "ranks of this algorithm agree only eventually";
  }
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
  if (AlgorithmRegistry::find(GetParam().algorithm).agreement != Agreement::kIdentical) {
    GTEST_SKIP() << "what this algorithm does to gradients is its own";
  }
  const auto gradients = randomGradients(1001, at::kDouble);
  at::Tensor mean = gradients[0].clone();
  for (int rank = 1; rank < size(); ++rank) mean += gradients[rank];
  mean /= size();
  // Two quantisations, each off by at most half a step of range / 255; normal values span less than 9 here.
  const double bound = 2 * 0.5 * 9.0 / 255;
  for (const auto& result : reduce(gradients)) EXPECT_LE((result - mean).abs().max().item<double>(), bound);
}

TEST_P(AlgorithmContract, EqualGradientsStayWhatTheyAre) {
  for (const auto& result : reduce(std::vector<at::Tensor>(size(), at::full({513}, 0.37F)))) {
    // A constant chunk decodes to within an ulp or so.
    EXPECT_LE((result - 0.37F).abs().max().item<double>(), 1e-6);
  }
}

TEST_P(AlgorithmContract, AnInfinityOnOneRankReachesAll) {
  auto gradients = randomGradients(64, at::kFloat);
  gradients.back()[3] = std::numeric_limits<float>::infinity();
  for (const auto& result : reduce(gradients)) EXPECT_FALSE(result.isfinite().all().item<bool>());
}

INSTANTIATE_TEST_SUITE_P(Every, AlgorithmContract, ::testing::ValuesIn(casesOfEveryAlgorithm()), nameOf);

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
