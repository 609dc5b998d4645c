// SPDX-License-Identifier: Apache-2.0
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <limits>

#include "algorithms/algorithm_interfaces.h"
#include "algorithms/powersgd/matrices.h"
#include "algorithms/powersgd/starting_factors.h"
#include "algorithms/registry.h"
#include "tests/support/immediate_steps.h"
#include "tests/support/thread_ranks.h"

namespace bagua {
namespace {

using Sizes = std::vector<int64_t>;

at::Tensor random(at::IntArrayRef sizes, uint64_t seed, at::ScalarType dtype = at::kFloat) {
  return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed)).to(dtype);
}

std::unique_ptr<Algorithm> create(std::map<std::string, OptionValue> options) {
  options.emplace("start_step", int64_t{0});
  const auto& info = AlgorithmRegistry::find("powersgd");
  return info.create(Options(info.name, info.options, options));
}

// Gradients by parameter.
using Gradients = std::vector<at::Tensor>;

// A model's gradients of one step and rank: matrices of equal and of other shapes, a convolution, vectors, one that is
// too small for factors, one without elements.
const std::vector<Sizes> kShapes = {{40, 30}, {17},   {40, 30}, {8, 3, 5, 5}, {3, 4},
                                    {},       {0, 7}, {31, 64}, {40, 30},     {1, 50}};

Gradients gradientsOf(int rank, int step, at::ScalarType dtype = at::kFloat) {
  Gradients gradients;
  for (size_t i = 0; i < kShapes.size(); ++i) {
    gradients.push_back(random(kShapes[i], 1000 * step + 100 * rank + i, dtype));
  }
  return gradients;
}

// One step, with the parameters divided into buckets; what the gradients become.
Gradients step(Algorithm& algorithm, const Gradients& gradients, const std::vector<std::vector<int64_t>>& buckets,
               int64_t number, Communicator& communicator) {
  Gradients reduced(gradients.size());
  for (const auto& positions : buckets) {
    std::vector<at::Tensor> parts;
    for (const int64_t position : positions) parts.push_back(gradients[position].reshape(-1));
    Bucket bucket{.flat = at::cat(parts), .step = number};
    int64_t begin = 0;
    for (const int64_t position : positions) {
      const int64_t length = gradients[position].numel();
      bucket.entries.push_back({position, bucket.flat.narrow(0, begin, length).view(gradients[position].sizes())});
      begin += length;
    }
    algorithm.reduce(bucket, communicator);
    for (const auto& entry : bucket.entries) reduced[entry.parameter] = entry.gradient;
  }
  return reduced;
}

const std::vector<std::vector<int64_t>> kOneBucket = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}};

std::vector<Gradients> stepsOfRank(Communicator& communicator, Algorithm& algorithm, int steps,
                                   const std::vector<std::vector<int64_t>>& buckets = kOneBucket,
                                   at::ScalarType dtype = at::kFloat) {
  std::vector<Gradients> history;
  for (int number = 0; number < steps; ++number) {
    history.push_back(step(algorithm, gradientsOf(communicator.rank(), number, dtype), buckets, number, communicator));
  }
  return history;
}

at::Tensor meanOf(int ranks, int number, int64_t parameter, at::ScalarType dtype = at::kFloat) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(gradientsOf(rank, number, dtype)[parameter].to(at::kDouble));
  return at::stack(all).mean(0);
}

bool areSame(const Gradients& one, const Gradients& other) {
  for (size_t i = 0; i < one.size(); ++i) {
    if (!at::equal(one[i], other[i])) return false;
  }
  return true;
}

bool areSame(const AlgorithmState& one, const AlgorithmState& other) {
  if (one.size() != other.size()) return false;
  for (const auto& [name, value] : one) {
    if (!other.contains(name) || !at::equal(value, other.at(name))) return false;
  }
  return true;
}

at::Tensor orthonormal(const at::Tensor& columns) { return std::get<0>(at::linalg_qr(columns)); }

// The algorithm once more, in float64 and one matrix at a time: what it is compared with. `starts` is (columns, rank).
class Reference {
 public:
  Reference(int ranks, const at::Tensor& start) : ranks_(ranks), q_(start.to(at::kDouble)), residuals_(ranks) {}

  at::Tensor step(const std::vector<at::Tensor>& gradients) {
    std::vector<at::Tensor> sums;
    for (int rank = 0; rank < ranks_; ++rank) {
      sums.push_back(gradients[rank].to(at::kDouble));
      if (residuals_[rank].defined()) sums.back() = sums.back() + residuals_[rank];
    }
    const at::Tensor mean = at::stack(sums).mean(0);
    const at::Tensor p = orthonormal(mean.matmul(orthonormal(q_)));
    q_ = mean.t().matmul(p);
    const at::Tensor product = p.matmul(q_.t());
    for (int rank = 0; rank < ranks_; ++rank) residuals_[rank] = sums[rank] - product;
    return product;
  }

 private:
  const int ranks_;
  at::Tensor q_;
  std::vector<at::Tensor> residuals_;
};

double relativeDistance(const at::Tensor& got, const at::Tensor& expected) {
  return ((got.to(at::kDouble) - expected).norm() / expected.norm()).item<double>();
}

TEST(PowerSgd, EachStepIsThatOfTheDefinition) {
  constexpr int kRanks = 3;
  constexpr int kSteps = 6;
  for (const int64_t rank : {1, 2, 4}) {
    const powersgd::Worth worth{.rank = rank, .minCompression = 2};
    powersgd::StartingFactors starts(true, 0);
    std::vector<Gradients> history;
    testing::runRanks(kRanks, [&](Communicator& communicator) {
      const auto algorithm = create({{"rank", rank}});
      auto own = stepsOfRank(communicator, *algorithm, kSteps);
      if (communicator.rank() == 0) history = std::move(own);
    });
    for (size_t parameter = 0; parameter < kShapes.size(); ++parameter) {
      SCOPED_TRACE(c10::str("rank ", rank, " parameter ", parameter));
      const auto shape = powersgd::matrixOf(at::zeros(kShapes[parameter]), worth);
      for (int number = 0; number < kSteps && !shape; ++number) {
        const at::Tensor expected = meanOf(kRanks, number, static_cast<int64_t>(parameter));
        EXPECT_TRUE(history[number][parameter].to(at::kDouble).allclose(expected, 1e-6, 1e-7)) << number;
      }
      if (!shape) continue;
      const powersgd::MatrixGroup group{*shape, {{static_cast<int64_t>(parameter), {0, shape->rows * shape->columns}}}};
      Reference reference(kRanks, starts.startOf(group, 0, at::kFloat)[0].t());
      for (int number = 0; number < kSteps; ++number) {
        std::vector<at::Tensor> gradients;
        for (int r = 0; r < kRanks; ++r) {
          gradients.push_back(gradientsOf(r, number)[parameter].view({shape->rows, shape->columns}));
        }
        const at::Tensor got = history[number][parameter].view({shape->rows, shape->columns});
        EXPECT_LT(relativeDistance(got, reference.step(gradients)), 1e-5) << number;
      }
    }
  }
}

TEST(PowerSgd, RanksHoldTheSameBitsOfEveryDtypeOnAnyHosts) {
  for (const auto& hosts : std::vector<std::vector<std::string>>{{"a"}, {"a", "a", "b"}, {"a", "b", "b", "c", "a"}}) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      for (const std::string codec : {"", "minmax_uint8"}) {
        const auto size = static_cast<int>(hosts.size());
        std::vector<std::vector<Gradients>> results(size);
        testing::runRanks(
            size,
            [&](Communicator& communicator) {
              const auto algorithm = create({{"rank", int64_t{2}}, {"codec", codec}});
              results[communicator.rank()] = stepsOfRank(communicator, *algorithm, 3, kOneBucket, dtype);
            },
            hosts);
        for (int number = 0; number < 3; ++number) {
          for (int rank = 1; rank < size; ++rank) {
            EXPECT_TRUE(areSame(results[rank][number], results[0][number])) << dtype << " " << codec;
          }
          // Vectors are exact whatever becomes of the factors.
          const double tolerance = dtype == at::kBFloat16 ? 8e-3 : dtype == at::kHalf ? 1e-3 : 1e-6;
          EXPECT_LT(relativeDistance(results[0][number][1], meanOf(size, number, 1, dtype)), tolerance);
        }
      }
    }
  }
}

TEST(PowerSgd, WhatTheOptimizerSawDiffersFromTheMeansByTheResidualsHeld) {
  constexpr int kRanks = 4;
  constexpr int kSteps = 12;
  for (const std::string codec : {"", "minmax_uint8"}) {
    std::vector<AlgorithmState> states(kRanks);
    std::vector<Gradients> history;
    testing::runRanks(kRanks,
                      [&](Communicator& communicator) {
                        const auto algorithm = create({{"rank", int64_t{1}}, {"codec", codec}});
                        auto own = stepsOfRank(communicator, *algorithm, kSteps);
                        states[communicator.rank()] = algorithm->as<KeepsState>()->state();
                        if (communicator.rank() == 0) history = std::move(own);
                      },
                      {"a", "a", "b", "c"});
    for (const int64_t parameter : {0, 2, 3, 7, 8}) {
      at::Tensor given = at::zeros(kShapes[parameter], at::kDouble);
      at::Tensor seen = at::zeros(kShapes[parameter], at::kDouble);
      for (int number = 0; number < kSteps; ++number) {
        given += meanOf(kRanks, number, parameter);
        seen += history[number][parameter];
      }
      at::Tensor held = at::zeros({given.numel()}, at::kDouble);
      for (const auto& state : states) held += state.at("residual." + std::to_string(parameter)) / kRanks;
      EXPECT_GT(held.norm().item<double>(), 0.1 * given.norm().item<double>()) << "a test of nothing";
      EXPECT_LT(relativeDistance(seen + held.view(kShapes[parameter]), given), 1e-6) << parameter << codec;
    }
  }
}

TEST(PowerSgd, GradientsOfItsRankArriveAsTheyAreAndSoDoThoseOfASmallerOne) {
  for (const int64_t ofGradients : {1, 3}) {
    testing::runRanks(3, [&](Communicator& communicator) {
      const auto algorithm = create({{"rank", int64_t{3}}});
      const at::Tensor left = random({50, ofGradients}, 70);
      const at::Tensor right = random({ofGradients, 40}, 71);
      for (int number = 0; number < 4; ++number) {
        at::Tensor mean = at::zeros({50, 40});
        Gradients own;
        for (int rank = 0; rank < 3; ++rank) {
          const at::Tensor gradient =
              left.matmul(random({ofGradients, ofGradients}, 80 + 10 * rank + number)).matmul(right);
          mean += gradient / 3;
          if (rank == communicator.rank()) own = {gradient};
        }
        EXPECT_LT(relativeDistance(step(*algorithm, own, {{0}}, number, communicator)[0], mean), 1e-5) << number;
      }
    });
  }
}

TEST(PowerSgd, AfterStepsOfZerosItGoesOnAsAtFirst) {
  testing::runRanks(2, [&](Communicator& communicator) {
    const auto used = create({{"rank", int64_t{2}}});
    for (int number = 0; number < 3; ++number) {
      const auto zeros = step(*used, {at::zeros({30, 40}), at::zeros({5})}, {{0, 1}}, number, communicator);
      EXPECT_EQ(zeros[0].abs().max().item<float>(), 0);
    }
    const Gradients gradients = {random({30, 40}, communicator.rank()), at::ones({5})};
    const auto fresh = create({{"rank", int64_t{2}}});
    EXPECT_TRUE(
        areSame(step(*used, gradients, {{0, 1}}, 3, communicator), step(*fresh, gradients, {{0, 1}}, 0, communicator)));
  });
}

// What cannot be used leaves its gradients NaN on all ranks and the state as it was.
TEST(PowerSgd, AStepWithNanOrInfinityLeavesNoTrace) {
  for (const float value : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    // In a matrix, in a vector.
    for (const size_t parameter : {size_t{2}, size_t{1}}) {
      testing::runRanks(3, [&](Communicator& communicator) {
        const auto algorithm = create({});
        stepsOfRank(communicator, *algorithm, 2);
        const AlgorithmState before = algorithm->as<KeepsState>()->state();
        Gradients gradients = gradientsOf(communicator.rank(), 2);
        if (communicator.rank() == 1) gradients[parameter].view(-1)[5] = value;
        const auto reduced = step(*algorithm, gradients, kOneBucket, 2, communicator);
        EXPECT_FALSE(reduced[parameter].isfinite().all().item<bool>());
        EXPECT_TRUE(areSame(algorithm->as<KeepsState>()->state(), before));
        for (const auto& gradient :
             step(*algorithm, gradientsOf(communicator.rank(), 3), kOneBucket, 3, communicator)) {
          EXPECT_TRUE(gradient.isfinite().all().item<bool>());
        }
      });
    }
  }
}

TEST(PowerSgd, OtherBucketsChangeNoBit) {
  const std::vector<std::vector<int64_t>> others = {{8, 3, 1}, {7, 0}, {9, 6, 5, 4, 2}};
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    testing::runRanks(3,
                      [&](Communicator& communicator) {
                        const auto algorithm = create({{"rank", int64_t{3}}});
                        const auto rebuilt = create({{"rank", int64_t{3}}});
                        for (int number = 0; number < 4; ++number) {
                          const Gradients gradients = gradientsOf(communicator.rank(), number, dtype);
                          const auto one = step(*algorithm, gradients, kOneBucket, number, communicator);
                          const auto other =
                              step(*rebuilt, gradients, number < 2 ? kOneBucket : others, number, communicator);
                          EXPECT_TRUE(areSame(one, other)) << dtype << " " << number;
                        }
                        EXPECT_TRUE(areSame(algorithm->as<KeepsState>()->state(), rebuilt->as<KeepsState>()->state()));
                      },
                      {"a", "b", "b"});
  }
}

TEST(PowerSgd, ACheckpointContinuesBitForBit) {
  testing::runRanks(2, [&](Communicator& communicator) {
    const std::vector<at::Tensor> parameters = gradientsOf(0, 0);
    testing::ImmediateSteps context(communicator, parameters);
    const auto algorithm = create({});
    stepsOfRank(communicator, *algorithm, 3);
    const auto continued = create({});
    continued->as<KeepsState>()->load(algorithm->as<KeepsState>()->state(), context);
    for (int number = 3; number < 5; ++number) {
      const Gradients gradients = gradientsOf(communicator.rank(), number);
      EXPECT_TRUE(areSame(step(*algorithm, gradients, kOneBucket, number, communicator),
                          step(*continued, gradients, kOneBucket, number, communicator)));
    }
    EXPECT_TRUE(areSame(algorithm->as<KeepsState>()->state(), continued->as<KeepsState>()->state()));
  });
}

TEST(PowerSgd, AStateThatDoesNotFitIsRefused) {
  testing::runRanks(1, [&](Communicator& communicator) {
    const std::vector<at::Tensor> parameters = {at::zeros({40, 30}), at::zeros({17})};
    testing::ImmediateSteps context(communicator, parameters);
    const auto algorithm = create({});
    algorithm->as<KeepsState>()->load({{"q.0", at::zeros({4, 30})}, {"residual.0", at::zeros({1200})}}, context);
    for (const auto& [name, value] :
         std::vector<std::pair<std::string, at::Tensor>>{{"q.0", at::zeros({3, 30})},
                                                         {"q.0", at::zeros({4, 30}, at::kLong)},
                                                         {"q.1", at::zeros({4, 17})},
                                                         {"q.2", at::zeros({4, 30})},
                                                         {"q.", at::zeros({4, 30})},
                                                         {"residual.0", at::zeros({1201})},
                                                         {"replica.0", at::zeros({3})}}) {
      EXPECT_THROW(algorithm->as<KeepsState>()->load({{name, value}}, context), c10::ValueError) << name;
    }
  });
}

TEST(PowerSgd, BeforeTheStartStepGradientsAreTheMeanAndNothingIsKept) {
  testing::runRanks(3, [&](Communicator& communicator) {
    const auto algorithm = create({{"start_step", int64_t{2}}});
    const auto history = stepsOfRank(communicator, *algorithm, 2);
    for (const int64_t parameter : {0, 3}) {
      EXPECT_LT(relativeDistance(history[1][parameter], meanOf(3, 1, parameter)), 1e-6);
    }
    EXPECT_TRUE(algorithm->as<KeepsState>()->state().empty());
    const auto reduced = step(*algorithm, gradientsOf(communicator.rank(), 2), kOneBucket, 2, communicator);
    EXPECT_GT(relativeDistance(reduced[0], meanOf(3, 2, 0)), 0.1);
  });
}

TEST(PowerSgd, NothingIsCompressedOnASingleHostIfHierarchicalNorOnASingleRank) {
  testing::runRanks(3, [&](Communicator& communicator) {
    const auto algorithm = create({{"hierarchical", true}});
    const auto history = stepsOfRank(communicator, *algorithm, 1);
    EXPECT_LT(relativeDistance(history[0][0], meanOf(3, 0, 0)), 1e-6);
  });
  testing::runRanks(1, [&](Communicator& communicator) {
    const auto algorithm = create({});
    EXPECT_TRUE(areSame(stepsOfRank(communicator, *algorithm, 1)[0], gradientsOf(0, 0)));
  });
}

TEST(PowerSgd, WithoutWarmStartEachStepDrawsAnewAndEachSeedOtherwise) {
  testing::runRanks(2, [&](Communicator& communicator) {
    const auto algorithm = create({{"warm_start", false}, {"error_feedback", false}});
    const Gradients gradients = gradientsOf(communicator.rank(), 0);
    const auto first = step(*algorithm, gradients, kOneBucket, 0, communicator);
    const auto second = step(*algorithm, gradients, kOneBucket, 1, communicator);
    EXPECT_FALSE(at::equal(first[0], second[0]));
    EXPECT_TRUE(areSame(first, step(*algorithm, gradients, kOneBucket, 0, communicator)));
    EXPECT_TRUE(algorithm->as<KeepsState>()->state().empty());
    const auto seeded = create({{"warm_start", false}, {"error_feedback", false}, {"seed", int64_t{1}}});
    EXPECT_FALSE(at::equal(first[0], step(*seeded, gradients, kOneBucket, 0, communicator)[0]));
  });
}

TEST(PowerSgd, OptionsOutOfRangeAreRefused) {
  for (const auto& [name, value] : std::vector<std::pair<std::string, OptionValue>>{{"rank", int64_t{0}},
                                                                                    {"start_step", int64_t{-1}},
                                                                                    {"min_compression", 0.0},
                                                                                    {"codec", std::string("none")}}) {
    EXPECT_THROW(AlgorithmRegistry::find("powersgd")
                     .create(Options("powersgd", AlgorithmRegistry::find("powersgd").options, {{name, value}})),
                 c10::ValueError)
        << name;
  }
}

}  // namespace
}  // namespace bagua
