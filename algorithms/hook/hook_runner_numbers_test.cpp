// SPDX-License-Identifier: Apache-2.0
// The step and the key that a HookRunner gives every bucket.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <set>

#include "algorithms/hook/hook_runner.h"
#include "algorithms/registry.h"
#include "tests/support/immediate_group.h"

namespace bagua {
namespace {

struct Numbers {
  int64_t step = 0;
  uint64_t key = 0;
};

// Of the buckets that were reduced since it was emptied.
std::vector<Numbers>& seen() {
  static std::vector<Numbers> all;
  return all;
}

class Watching final : public Algorithm {
 public:
  void reduce(Bucket& bucket, Communicator& /*communicator*/) override { seen().push_back({bucket.step, bucket.key}); }
};

// A step of two buckets.
std::vector<Numbers> step(HookRunner& runner) {
  seen().clear();
  for (const int64_t parameter : {1, 0}) {
    const at::Tensor flat = at::zeros({3});
    runner.reduceBucket(flat, {{parameter, flat}}, parameter == 1, parameter == 0)->wait(kNoTimeout);
  }
  return seen();
}

TEST(HookRunner, EveryBucketHasTheNumberOfItsStepAndAKeyOfItsOwn) {
  const auto group = std::make_shared<testing::ImmediateGroup>();
  const std::vector<at::Tensor> parameters = {at::zeros({3}), at::zeros({3})};
  HookRunner runner("watching", {}, group, parameters);
  std::set<uint64_t> keys;
  for (int64_t number = 0; number < 3; ++number) {
    const auto buckets = step(runner);
    ASSERT_EQ(buckets.size(), 2);
    for (const auto& bucket : buckets) {
      EXPECT_EQ(bucket.step, number);
      keys.insert(bucket.key);
    }
  }
  EXPECT_EQ(keys.size(), 6);
  EXPECT_EQ(runner.step(), 3);

  HookRunner continued("watching", {}, group, parameters);
  continued.load({}, {}, runner.step());
  const auto expected = step(runner);
  const auto buckets = step(continued);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(buckets[i].step, 3);
    EXPECT_EQ(buckets[i].key, expected[i].key);
  }
  EXPECT_THROW(continued.load({}, {}, -1), c10::ValueError);
}

TEST(HookRunner, RefusesACodecThatTakesNoTensorsOfTheModelsDevice) {
  const std::vector<at::Tensor> parameters = {at::empty({2}, at::kMeta)};
  const auto group = std::make_shared<ImmediateGroup>();
  HookRunner("gradient_allreduce", {}, group, parameters, false);
  for (const std::string codec : {"int8", "2bit", "fc*=4bit, *=int8"}) {
    const std::string algorithm = codec == "int8" ? "bytegrad" : "quantized_allreduce";
    try {
      HookRunner(algorithm, {{"codec", codec}}, group, parameters, false);
      FAIL() << algorithm << " with " << codec << " takes a model that no codec takes";
    } catch (const c10::NotImplementedError& error) {
      EXPECT_NE(std::string(error.what()).find("works on tensors of cpu, cuda, got meta"), std::string::npos)
          << error.what();
    }
  }
}

}  // namespace

BAGUA_REGISTER_ALGORITHM({
    .name = "watching",
    .summary = "For this test.",
    .create = [](const Options& /*options*/) { return std::make_unique<Watching>(); },
})

}  // namespace bagua
