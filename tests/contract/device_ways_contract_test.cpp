// SPDX-License-Identifier: Apache-2.0
// Every algorithm with every codec and the options that change its way: what CPU tensors come to that go the ways of a
// device, beside what they come to on the CPU. Programs are watched, see tests/support/device_program.h.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "algorithms/algorithm_interfaces.h"
#include "algorithms/registry.h"
#include "kernels/codec.h"
#include "kernels/device_ways.h"
#include "tests/support/device_program.h"
#include "tests/support/immediate_steps.h"
#include "tests/support/thread_ranks.h"

namespace bagua {
namespace {

using Given = std::map<std::string, OptionValue>;
using Tensors = std::vector<at::Tensor>;

struct Setting {
  std::string algorithm;
  Given options;
  // Of the results, relative to the largest of a tensor. Zero: they have the same bits.
  double difference = 0;
};

struct Way {
  // By rank: what every step has left of the gradients or weights, and the state at the end.
  std::vector<Tensors> steps;
  std::vector<AlgorithmState> states;
};

const std::vector<std::vector<std::string>> kLayouts = {
    {"a", "b"}, {"a", "a", "b"}, {"a", "b", "a", "b"}, {"a", "b", "c"}};
constexpr int kSteps = 4;
// GradScaler skips the optimizer's step after it on all ranks.
constexpr int kLostStep = 1;
// In some step no rank uses the parameter, in others some do.
constexpr size_t kSometimesUnused = 3;

const std::vector<std::vector<int64_t>> kShapes = {{40, 30}, {17}, {40, 30}, {64, 33}, {8, 3, 5, 5}, {130}};
// Two of them.
const std::vector<std::vector<size_t>> kBuckets = {{5, 4, 3}, {2, 1, 0}};

at::Tensor random(at::IntArrayRef sizes, uint64_t seed) {
  return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed));
}

std::unique_ptr<Algorithm> create(const Setting& it) {
  const auto& info = AlgorithmRegistry::find(it.algorithm);
  return info.create(Options(info.name, info.options, it.options));
}

at::Tensor gradientOf(size_t parameter, int rank, int step) {
  const at::Tensor gradient = random(kShapes[parameter], 1000 * step + 100 * rank + parameter);
  if (step == kLostStep && rank == 1 && parameter == 2) gradient.view(-1)[7] = std::numeric_limits<float>::infinity();
  return gradient;
}

bool isUsed(size_t parameter, int rank, int step) {
  return parameter != kSometimesUnused || step == 0 || (step == 3 && rank == 0);
}

Bucket bucketOf(const std::vector<size_t>& parameters, int rank, int step) {
  Tensors parts;
  for (const size_t parameter : parameters) {
    const at::Tensor gradient = gradientOf(parameter, rank, step).view(-1);
    parts.push_back(isUsed(parameter, rank, step) ? gradient : at::zeros_like(gradient));
  }
  Bucket bucket{.flat = at::cat(parts), .tellsUse = true, .step = step};
  int64_t begin = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor gradient = bucket.flat.narrow(0, begin, parts[i].numel()).view(kShapes[parameters[i]]);
    bucket.entries.push_back({static_cast<int64_t>(parameters[i]), gradient, isUsed(parameters[i], rank, step)});
    begin += parts[i].numel();
  }
  bucket.key = bucketKey(0, step, bucket.entries.front().parameter);
  return bucket;
}

// Steps of a training, of which one is lost; residuals are rescaled before the last.
void reduceGradients(Algorithm& algorithm, Communicator& communicator, Tensors& steps) {
  for (int step = 0; step < kSteps; ++step) {
    if (auto* residuals = algorithm.as<KeepsResiduals>(); residuals != nullptr && step + 1 == kSteps)
      residuals->rescale(0.5);
    for (const auto& parameters : kBuckets) {
      Bucket bucket = bucketOf(parameters, communicator.rank(), step);
      testing::runProgram(bucket.flat.device(), communicator,
                          [&](Communicator& ofProgram) { algorithm.reduce(bucket, ofProgram); });
      steps.push_back(bucket.flat);
    }
  }
}

void changeWeights(ActsOnWeights& algorithm, StepContext& context, const Tensors& weights, Tensors& steps) {
  for (int step = 0; step < 2 * kSteps; ++step) {
    algorithm.beforeForward(context);
    algorithm.afterBackward(context);
    for (size_t i = 0; i < weights.size(); ++i) weights[i].sub_(gradientOf(i, context.rank(), 10 + step), 0.01);
    algorithm.afterStep(context);
    for (const auto& weight : weights) steps.push_back(weight.clone());
  }
  algorithm.synchronize(context);
  for (const auto& weight : weights) steps.push_back(weight.clone());
}

Way run(const Setting& it, const std::vector<std::string>& hosts) {
  const auto size = static_cast<int>(hosts.size());
  Way way{std::vector<Tensors>(size), std::vector<AlgorithmState>(size)};
  testing::runRanks(
      size,
      [&](Communicator& communicator) {
        const at::NoGradGuard noGrad;
        const int rank = communicator.rank();
        const auto algorithm = create(it);
        Tensors weights;
        for (size_t i = 0; i < kShapes.size(); ++i) weights.push_back(random(kShapes[i], size_t{100} * rank + i));
        testing::ImmediateSteps context(communicator, weights);
        std::vector<Momentum> momenta;
        for (size_t i = 0; i < kShapes.size(); ++i) momenta.push_back({random(kShapes[i], 7 + i), 0.9});
        if (auto* uses = algorithm->as<UsesMomenta>()) uses->useMomenta(momenta);
        if (auto* onWeights = algorithm->as<ActsOnWeights>()) {
          onWeights->useModel(context);
          changeWeights(*onWeights, context, weights, way.steps[rank]);
        } else {
          reduceGradients(*algorithm, communicator, way.steps[rank]);
        }
        if (const auto* keeps = algorithm->as<KeepsState>()) way.states[rank] = keeps->state();
      },
      hosts);
  return way;
}

void expectAlike(const at::Tensor& onDevice, const at::Tensor& onCpu, double difference, const std::string& what) {
  ASSERT_EQ(onDevice.sizes(), onCpu.sizes()) << what;
  ASSERT_EQ(onDevice.scalar_type(), onCpu.scalar_type()) << what;
  if (difference == 0) {
    EXPECT_TRUE(onDevice.equal(onCpu) ||
                (onDevice.isnan().equal(onCpu.isnan()) && onDevice.nan_to_num().equal(onCpu.nan_to_num())))
        << what << " differs by " << (onDevice - onCpu).abs().max().item<double>();
    return;
  }
  const at::Tensor isFinite = onCpu.isfinite();
  EXPECT_TRUE(onDevice.isfinite().equal(isFinite)) << what;
  const at::Tensor expected = onCpu.masked_select(isFinite).to(at::kDouble);
  if (expected.numel() == 0) return;
  const at::Tensor distance = (onDevice.masked_select(isFinite).to(at::kDouble) - expected).abs().max();
  EXPECT_LE(distance.item<double>(), difference * expected.abs().max().item<double>()) << what;
}

void expectAlike(const Way& onDevice, const Way& onCpu, double difference) {
  for (size_t rank = 0; rank < onCpu.steps.size(); ++rank) {
    for (size_t i = 0; i < onCpu.steps[rank].size(); ++i) {
      // One difference leads to others.
      if (::testing::Test::HasFailure()) return;
      expectAlike(onDevice.steps[rank][i], onCpu.steps[rank][i], difference, c10::str("rank ", rank, ", result ", i));
    }
    ASSERT_EQ(onDevice.states[rank].size(), onCpu.states[rank].size());
    for (const auto& [name, value] : onCpu.states[rank]) {
      if (name == "milliseconds_to_round") continue;
      ASSERT_TRUE(onDevice.states[rank].contains(name)) << name;
      expectAlike(onDevice.states[rank].at(name), value, difference, c10::str("rank ", rank, ", ", name));
    }
  }
}

std::vector<Setting> cases() {
  std::vector<Setting> all = {{"gradient_allreduce", {}}, {"async", {{"sync_interval_ms", int64_t{600'000}}}}};
  for (const bool hierarchical : {false, true}) {
    for (const auto& codec : CodecRegistry::names()) {
      all.push_back({"bytegrad", {{"hierarchical", hierarchical}, {"codec", codec}}});
      all.push_back({"low_precision_decentralized", {{"hierarchical", hierarchical}, {"codec", codec}}});
      for (const char* const residuals : {"float32", "8bit"}) {
        all.push_back({"quantized_allreduce",
                       {{"hierarchical", hierarchical},
                        {"codec", codec},
                        {"error_feedback", true},
                        {"residuals", std::string(residuals)}}});
      }
      for (const bool errorFeedback : {false, true}) {
        all.push_back({"qadam", {{"hierarchical", hierarchical}, {"codec", codec}, {"error_feedback", errorFeedback}}});
      }
    }
    all.push_back({"quantized_allreduce", {{"hierarchical", hierarchical}, {"rounding", std::string("stochastic")}}});
    all.push_back({"decentralized", {{"hierarchical", hierarchical}}});
    for (const char* const codec : {"", "int8"}) {
      all.push_back({"diloco",
                     {{"hierarchical", hierarchical},
                      {"sync_every", int64_t{4}},
                      {"fragments", int64_t{2}},
                      {"delay", int64_t{0}},
                      {"codec", std::string(codec)}}});
      for (const bool isWarm : {false, true}) {
        all.push_back({"powersgd",
                       {{"hierarchical", hierarchical},
                        {"rank", int64_t{2}},
                        {"start_step", int64_t{0}},
                        {"warm_start", isWarm},
                        {"codec", std::string(codec)}},
                       // Sums of other orders: ATen's products of all matrices at once, and norms.
                       1e-4});
      }
    }
  }
  all.push_back({"local_sgd", {{"sync_every", int64_t{3}}}});
  return all;
}

std::string nameOf(const Setting& it) {
  std::string name = it.algorithm;
  for (const auto& [option, value] : it.options) {
    if (const auto* text = std::get_if<std::string>(&value)) name += "_" + (text->empty() ? "exact" : *text);
    if (const auto* flag = std::get_if<bool>(&value); flag != nullptr && *flag) name += "_" + option;
  }
  return name;
}

// GoogleTest looks for this name.
// NOLINTNEXTLINE(readability-identifier-naming)
void PrintTo(const Setting& it, std::ostream* stream) { *stream << nameOf(it); }

class DeviceWays : public ::testing::TestWithParam<Setting> {};

TEST_P(DeviceWays, ComeToTheSameAsTheCpu) {
  for (const auto& hosts : kLayouts) {
    SCOPED_TRACE(
        c10::str(c10::IntArrayRef({static_cast<int64_t>(hosts.size())}), " ranks, the last on host ", hosts.back()));
    const Way onCpu = run(GetParam(), hosts);
    const AsOnDevice asOnDevice;
    expectAlike(run(GetParam(), hosts), onCpu, GetParam().difference);
  }
}

INSTANTIATE_TEST_SUITE_P(Every, DeviceWays, ::testing::ValuesIn(cases()),
                         [](const auto& instance) { return nameOf(instance.param); });

}  // namespace
}  // namespace bagua
