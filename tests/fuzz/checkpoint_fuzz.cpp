// SPDX-License-Identifier: Apache-2.0
// The state of an algorithm as a checkpoint may hold it: any names, numbers, shapes. It is refused with an exception,
// or the algorithm works with it. The same for the layout of buckets, and for the hosts that peers name in the store.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>

#include <array>
#include <set>

#include "algorithms/algorithm_interfaces.h"
#include "algorithms/hook/bucket_layout.h"
#include "algorithms/registry.h"
#include "tests/fuzz/fuzzed_bytes.h"
#include "tests/fuzz/lone_rank.h"
#include "tests/support/immediate_steps.h"

namespace bagua {
namespace {

using fuzz::FuzzedBytes;

at::Tensor madeUpEntry(FuzzedBytes& input, int64_t parameters) {
  switch (input.take<uint8_t>() % 5) {
    case 0:
      return counterTensor(input.claim());
    case 1:
      return counterTensor(input.take<uint8_t>());
    case 2:
      return at::ones({input.from(0, 3)}, at::kLong);
    case 3:
      return at::ones({}, at::kDouble);
    default:
      return at::ones({input.coin() ? parameters : input.from(0, 2 * parameters)});
  }
}

AlgorithmState madeUpState(FuzzedBytes& input, int64_t parameters) {
  static const std::array<std::string, 8> kNames = {
      "step",           "exchanges",      "has_started",    "is_paused", "milliseconds_to_round",
      "replica.self.0", "replica.left.0", "replica.right.0"};
  AlgorithmState state;
  for (int64_t count = input.from(0, 10); count > 0; --count) {
    const auto which = input.take<uint8_t>();
    const std::string name = which < 250 ? kNames.at(which % kNames.size()) : input.text(12);
    state[name] = madeUpEntry(input, parameters);
  }
  return state;
}

std::vector<std::string> madeUpHosts(FuzzedBytes& input) {
  std::vector<std::string> hosts;
  for (int64_t ranks = input.from(1, 6); ranks > 0; --ranks) hosts.push_back(input.text(2));
  return hosts;
}

void checkTopology(const HostTopology& topology, size_t ranks) {
  std::set<int> seen;
  for (int host = 0; host < topology.hostCount(); ++host) {
    for (const int rank : topology.ranksOf(host)) {
      TORCH_INTERNAL_ASSERT(seen.insert(rank).second && topology.hostOf(rank) == host);
      TORCH_INTERNAL_ASSERT(topology.ranksOf(host).at(topology.localRank(rank)) == rank);
    }
  }
  TORCH_INTERNAL_ASSERT(seen.size() == ranks);
}

void checkLayouts(FuzzedBytes& input) {
  std::vector<at::Tensor> parameters;
  Slots bucket;
  for (int64_t position = input.from(1, 6) - 1; position >= 0; --position) {
    parameters.push_back(at::ones({position + 1}));
    bucket.push_back({static_cast<int64_t>(bucket.size()), parameters.back()});
  }
  BucketLayout layout(input.from(0, 4));
  for (auto& group : layout) {
    for (int64_t count = input.from(0, 4); count > 0; --count) {
      group.push_back(input.take<uint8_t>() < 230 ? input.from(0, 6) : input.claim());
    }
  }
  BucketLayouts layouts(parameters, 1);
  layouts.check(layout);
  layouts.want(layout);
  size_t parts = 0;
  for (const auto& part : layouts.partsOf(bucket)) parts += part.size();
  TORCH_INTERNAL_ASSERT(parts == bucket.size(), "a gradient has been lost");
}

void loadAndStep(FuzzedBytes& input) {
  const auto names = AlgorithmRegistry::names();
  const auto& info = AlgorithmRegistry::find(names.at(input.take<uint8_t>() % names.size()));
  const auto hosts = madeUpHosts(input);
  const std::vector<at::Tensor> parameters = {at::ones({7}), at::ones({5})};
  fuzz::LoneRank rank(static_cast<int>(hosts.size()), hosts,
                      [](void* bytes, size_t count) { std::memset(bytes, 0, count); });
  checkTopology(rank.communicator().topology(), hosts.size());
  testing::ImmediateSteps steps(rank.communicator(), parameters);
  const auto algorithm = info.create(Options(info.name, info.options, {}));
  auto* const onWeights = algorithm->as<ActsOnWeights>();
  auto* const keeps = algorithm->as<KeepsState>();
  if (onWeights != nullptr) onWeights->useModel(steps);
  if (keeps != nullptr) keeps->load(madeUpState(input, 12), steps);
  for (int step = 0; step < 2; ++step) {
    if (onWeights != nullptr) onWeights->beforeForward(steps);
    const at::Tensor flat = at::ones({12});
    Bucket bucket{.flat = flat, .entries = {{0, flat.narrow(0, 0, 7)}, {1, flat.narrow(0, 7, 5)}}};
    const bool travels = onWeights == nullptr || onWeights->gradientScope() != GradientScope::kNone;
    if (travels) algorithm->reduce(bucket, rank.communicator());
    if (onWeights == nullptr) continue;
    onWeights->afterBackward(steps);
    onWeights->afterStep(steps);
  }
  // What it would save it can load.
  if (keeps != nullptr) keeps->load(keeps->state(), steps);
}

}  // namespace

void fuzzCheckpoint(FuzzedBytes& input) {
  const at::NoGradGuard noGrad;
  try {
    input.coin() ? checkLayouts(input) : loadAndStep(input);
  } catch (const c10::ValueError&) {
    // It does not fit.
    return;
  }
}

}  // namespace bagua

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer calls it so
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  bagua::fuzz::FuzzedBytes input(data, size);
  bagua::fuzzCheckpoint(input);
  return 0;
}
