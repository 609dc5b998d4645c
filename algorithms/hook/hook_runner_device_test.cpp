// SPDX-License-Identifier: Apache-2.0
// What a HookRunner does otherwise on a GPU, with made-up tensors that nobody reads.
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "algorithms/hook/hook_runner.h"
#include "algorithms/registry.h"
#include "tests/support/immediate_group.h"

namespace bagua {
namespace {

using testing::ImmediateGroup;

at::Tensor onGpu() {
  static float memory[4] = {};
  const at::Device device(at::kCUDA, 0);
  return at::for_blob(memory, {4}).options(at::device(device).dtype(at::kFloat)).target_device(device).make_tensor();
}

bool wantsSmallBuckets(const std::string& algorithm, const at::Tensor& parameter,
                       const std::vector<std::string>& hosts) {
  const auto group = std::make_shared<ImmediateGroup>(hosts);
  HookRunner runner(algorithm, {}, group, {parameter});
  runner.begin();
  return runner.wantsSmallBuckets();
}

TEST(HookRunner, DdpsBucketsAreCutBetweenHostsUnlessTheyAreOnAGpu) {
  const std::vector<std::string> hosts = {"a", "b"};
  ASSERT_TRUE(onGpu().is_cuda());
  EXPECT_TRUE(wantsSmallBuckets("gradient_allreduce", at::zeros({4}), hosts));
  EXPECT_FALSE(wantsSmallBuckets("gradient_allreduce", onGpu(), hosts));
  EXPECT_FALSE(wantsSmallBuckets("gradient_allreduce", at::zeros({4}), {"a", "a"}));
  EXPECT_FALSE(wantsSmallBuckets("decentralized", at::zeros({4}), hosts));
}

using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

Weak& lastRetained() {
  static Weak tensor(at::Tensor().getIntrusivePtr());
  return tensor;
}

class Retaining final : public Algorithm {
 public:
  void reduce(Bucket& bucket, Communicator& /*communicator*/) override {
    const at::Tensor read = at::zeros({3});
    lastRetained() = Weak(read.getIntrusivePtr());
    bucket.retained->push_back(read);
  }
};

TEST(HookRunner, WhatABucketRetainsLivesAsLongAsTheProgram) {
  const auto group = std::make_shared<ImmediateGroup>();
  HookRunner runner("retaining", {}, group, {at::zeros({3})});
  const at::Tensor flat = at::zeros({3});
  runner.reduceBucket(flat, {{0, flat}}, true, true)->wait(kNoTimeout);
  ASSERT_EQ(group->programs.size(), 1);
  EXPECT_FALSE(lastRetained().expired());
  group->programs.clear();
  EXPECT_TRUE(lastRetained().expired());
}

}  // namespace

BAGUA_REGISTER_ALGORITHM({
    .name = "retaining",
    .summary = "For this test.",
    .create = [](const Options& /*options*/) { return std::make_unique<Retaining>(); },
})

}  // namespace bagua
