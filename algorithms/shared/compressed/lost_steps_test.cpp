// SPDX-License-Identifier: Apache-2.0
// Steps whose gradients are not finite leave no trace in the state of an algorithm, whether the host knows of them at
// once or a device tells of them one step later.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "algorithms/algorithm_interfaces.h"
#include "algorithms/registry.h"
#include "kernels/device_ways.h"
#include "tests/support/thread_ranks.h"

namespace bagua::compressed {
namespace {

using Buckets = std::vector<std::vector<int64_t>>;

struct Step {
  bool isFinite;
  Buckets buckets;
  // The parameters of these have no gradients in this step.
  Buckets passedOver = {};
};

const Buckets kFirst = {{0, 1, 2}};
const Buckets kRebuilt = {{2, 0}, {1}};

// The first step is lost, as GradScaler begins a run, while DDP rebuilds its buckets; later two in a row are lost, and
// once some parameters have no gradients in the step that follows.
const std::vector<Step> kSteps = {{false, kFirst},         {false, kRebuilt}, {true, kRebuilt}, {true, kRebuilt},
                                  {false, kRebuilt},       {false, kRebuilt}, {true, kFirst},   {false, kFirst},
                                  {true, {{1}}, {{2, 0}}}, {true, kRebuilt}};

struct LossyCase {
  std::string name;
  std::string algorithm;
  std::map<std::string, OptionValue> options;
  bool tellsUse;
  // The distance, relative to the norm, that ATen may cause on a device, where it may fuse operations. With 8 bits a
  // difference in the last bit may become another code, and that another value.
  double tolerance;
};

// GoogleTest looks for this name.
// NOLINTNEXTLINE(readability-identifier-naming)
void PrintTo(const LossyCase& it, std::ostream* stream) { *stream << it.name; }

// What each step makes of the gradients, and the state at the end.
struct Outcome {
  std::vector<at::Tensor> results;
  AlgorithmState state;
};

at::Tensor gradientOf(int64_t parameter, int rank, int64_t step, bool isFinite) {
  const std::vector<std::vector<int64_t>> sizes = {{40, 30}, {700}, {64, 50}};
  const uint64_t seed = 1000 * static_cast<uint64_t>(step) + 10 * static_cast<uint64_t>(rank) + parameter;
  const at::Tensor gradient = at::randn(sizes[parameter], at::make_generator<at::CPUGeneratorImpl>(seed));
  if (!isFinite && rank == 1 && parameter == 2) gradient[3][4] = std::numeric_limits<float>::infinity();
  return gradient;
}

Bucket bucketAt(const std::vector<int64_t>& positions, int64_t number, const LossyCase& it, int rank, bool isFinite) {
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> parts;
  for (const int64_t position : positions) {
    gradients.push_back(gradientOf(position, rank, number, isFinite));
    parts.push_back(gradients.back().reshape(-1));
  }
  Bucket bucket{.flat = at::cat(parts), .tellsUse = it.tellsUse, .step = number};
  int64_t begin = 0;
  for (size_t i = 0; i < positions.size(); ++i) {
    const int64_t length = gradients[i].numel();
    const at::Tensor gradient = bucket.flat.narrow(0, begin, length).view(gradients[i].sizes());
    // In some steps nobody uses one of them.
    const bool isUsed = !it.tellsUse || positions[i] != number % 4;
    if (!isUsed) gradient.zero_();
    bucket.entries.push_back({positions[i], gradient, isUsed});
    begin += length;
  }
  bucket.key = bucketKey(7, number, bucket.entries.front().parameter);
  return bucket;
}

std::vector<Outcome> outcomesOf(const LossyCase& it) {
  const std::vector<std::string> hosts = {"a", "b", "c"};
  std::vector<Outcome> outcomes(hosts.size());
  testing::runRanks(
      static_cast<int>(hosts.size()),
      [&](Communicator& communicator) {
        const auto& info = AlgorithmRegistry::find(it.algorithm);
        const auto algorithm = info.create(Options(info.name, info.options, it.options));
        Outcome& outcome = outcomes[communicator.rank()];
        for (int64_t number = 0; number < static_cast<int64_t>(kSteps.size()); ++number) {
          for (const auto& positions : kSteps[number].buckets) {
            Bucket bucket = bucketAt(positions, number, it, communicator.rank(), kSteps[number].isFinite);
            algorithm->reduce(bucket, communicator);
            outcome.results.push_back(bucket.flat);
          }
          for (const auto& positions : kSteps[number].passedOver) {
            Bucket bucket = bucketAt(positions, number, it, communicator.rank(), true);
            algorithm->as<KeepsResiduals>()->passOver(bucket, communicator);
          }
        }
        outcome.state = algorithm->as<KeepsState>()->state();
      },
      hosts);
  return outcomes;
}

void expectClose(const at::Tensor& its, const at::Tensor& others, double tolerance, const std::string& what) {
  ASSERT_EQ(its.sizes(), others.sizes()) << what;
  const at::Tensor got = its.to(at::kDouble);
  const at::Tensor expected = others.to(at::kDouble);
  ASSERT_TRUE(at::equal(got.isfinite(), expected.isfinite())) << what;
  const at::Tensor isFinite = expected.isfinite();
  const at::Tensor difference = (got - expected).masked_fill(isFinite.logical_not(), 0);
  const double distance = difference.norm().item<double>();
  EXPECT_LE(distance, tolerance * expected.masked_fill(isFinite.logical_not(), 0).norm().item<double>()) << what;
}

std::vector<LossyCase> cases() {
  std::vector<LossyCase> all;
  for (const bool tellsUse : {false, true}) {
    const std::string suffix = tellsUse ? "_unused" : "";
    for (const std::string codec : {"4bit", "minmax_uint8", "1bit"}) {
      const std::map<std::string, OptionValue> options = {
          {"codec", codec}, {"exact", std::string()}, {"error_feedback", true}};
      all.push_back({c10::str("of_", codec, suffix), "quantized_allreduce", options, tellsUse, 0});
      auto small = options;
      small.emplace("residuals", std::string("8bit"));
      all.push_back({c10::str("of_", codec, "_8bit", suffix), "quantized_allreduce", small, tellsUse, 0.1});
    }
    all.push_back({"of_powersgd" + suffix, "powersgd", {{"start_step", int64_t{0}}}, tellsUse, 1e-4});
  }
  return all;
}

class LostSteps : public ::testing::TestWithParam<LossyCase> {};

INSTANTIATE_TEST_SUITE_P(Every, LostSteps, ::testing::ValuesIn(cases()), [](const auto& it) { return it.param.name; });

TEST_P(LostSteps, LeaveTheSameOnADeviceAsOnTheHost) {
  const auto onCpu = outcomesOf(GetParam());
  const AsOnDevice asOnDevice;
  const auto onDevice = outcomesOf(GetParam());
  for (size_t rank = 0; rank < onCpu.size(); ++rank) {
    for (size_t i = 0; i < onCpu[rank].results.size(); ++i) {
      expectClose(onDevice[rank].results[i], onCpu[rank].results[i], GetParam().tolerance,
                  "rank " + std::to_string(rank) + ", result " + std::to_string(i));
    }
    ASSERT_EQ(onDevice[rank].state.size(), onCpu[rank].state.size());
    for (const auto& [name, values] : onCpu[rank].state) {
      ASSERT_TRUE(onDevice[rank].state.contains(name)) << name;
      expectClose(onDevice[rank].state.at(name), values, GetParam().tolerance, name);
    }
  }
}

}  // namespace
}  // namespace bagua::compressed
