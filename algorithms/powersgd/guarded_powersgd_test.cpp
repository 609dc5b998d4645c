// SPDX-License-Identifier: Apache-2.0
// powersgd under guard.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "algorithms/algorithm_interfaces.h"
#include "algorithms/powersgd/matrices.h"
#include "algorithms/powersgd/mean_look.h"
#include "algorithms/registry.h"
#include "tests/support/immediate_steps.h"
#include "tests/support/thread_ranks.h"

namespace bagua::powersgd {
namespace {

constexpr int64_t kElements = 1200;

std::unique_ptr<Algorithm> create(std::map<std::string, OptionValue> options) {
  options.emplace("start_step", int64_t{0});
  const auto& info = AlgorithmRegistry::find("powersgd");
  return info.create(Options(info.name, info.options, options));
}

// Two matrices of 40 rows.
at::Tensor gradientsOf(int rank, int64_t step) {
  return at::randn({2 * kElements}, at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(10 * step + rank)));
}

Bucket bucketOf(const at::Tensor& flat, int64_t step) {
  return {.flat = flat,
          .entries = {{0, flat.narrow(0, 0, kElements).view({40, 30})},
                      {1, flat.narrow(0, kElements, kElements).view({40, 30})}},
          .step = step};
}

at::Tensor reduced(Algorithm& algorithm, int64_t step, Communicator& communicator) {
  Bucket bucket = bucketOf(gradientsOf(communicator.rank(), step), step);
  algorithm.reduce(bucket, communicator);
  return bucket.flat;
}

// What a matrix held before it was raised depends on how many steps have swapped the sets, and a checkpoint has one of
// them.
TEST(GuardedPowerSgd, AMatrixThatWasRaisedBeginsAnewAlsoFromACheckpoint) {
  testing::runRanks(2, [&](Communicator& communicator) {
    const std::vector<at::Tensor> parameters = {at::zeros({40, 30}), at::zeros({40, 30})};
    testing::ImmediateSteps context(communicator, parameters);
    const auto whole = create({{"guard", std::string("adapt")}});
    const auto continued = create({{"guard", std::string("adapt")}});
    Guard& guard = whole->as<IsGuarded>()->guard();
    for (int64_t step = 0; step < 2; ++step) reduced(*whole, step, communicator);
    // Parameter 0 is raised by a level, since step 2 and for three steps, which is new.
    guard.load(at::tensor({0, 1, 2, 3, 1, 0, 0, 0, 0, 0, 0}, at::kLong).unsqueeze(0));
    for (int64_t step = 2; step < 7; ++step) {
      if (step == 4) {
        continued->as<KeepsState>()->load(whole->as<KeepsState>()->state(), context);
        continued->as<IsGuarded>()->guard().load(guard.state());
      }
      const at::Tensor flat = reduced(*whole, step, communicator);
      const at::Tensor mean = at::stack({gradientsOf(0, step), gradientsOf(1, step)}).mean(0);
      EXPECT_EQ((flat - mean).narrow(0, 0, kElements).abs().max().item<float>() < 1e-5, step < 5) << step;
      if (step < 4) continue;
      EXPECT_TRUE(at::equal(reduced(*continued, step, communicator), flat)) << step;
    }
  });
}

TEST(GuardedPowerSgd, AStepThatIsNotFiniteTellsNothing) {
  const Bucket bucket = bucketOf(gradientsOf(0, 0), 0);
  const auto division = divide(bucket, {.rank = 1, .minCompression = 2});
  const auto gradients = matricesOf(bucket, division.groups.front());
  for (const float factor : {3.0F, std::numeric_limits<float>::quiet_NaN()}) {
    Guard guard(Guard::Mode::kWarn);
    for (int64_t step = 0; step < 3; ++step) {
      guard.begin(bucketOf(bucket.flat, step), 1);
      const at::Tensor look = lookAt(gradients, {});
      tell(guard, step, division, 1, look, {gradients[0] * 3, gradients[1] * factor});
    }
    EXPECT_EQ(guard.report().alarms, factor == 3 ? 2 : 0);
  }
}

TEST(GuardedPowerSgd, WithoutErrorFeedbackItLooksAndDoesNotAdapt) {
  testing::runRanks(2, [&](Communicator& communicator) {
    const auto algorithm = create({{"error_feedback", false}});
    reduced(*algorithm, 0, communicator);
    EXPECT_EQ(algorithm->as<IsGuarded>()->guard().report().looks, 1);
  });
  EXPECT_THROW(create({{"error_feedback", false}, {"guard", std::string("adapt")}}), c10::ValueError);
}

}  // namespace
}  // namespace bagua::powersgd
