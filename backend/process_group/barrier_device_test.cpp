// SPDX-License-Identifier: Apache-2.0
#include "backend/process_group/barrier_device.h"

#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "backend/process_group/process_group_bagua.h"

namespace bagua {
namespace {

const c10::Device kCpu(c10::kCPU);

c10::Device gpu(int index) { return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

TEST(BarrierDevice, IsTheOneThatTheCallerNames) {
  EXPECT_EQ(barrierDevice({.deviceIds = {3, 4}, .bound = gpu(2), .used = {kCpu, gpu(1)}, .hasGpu = true}), gpu(3));
}

TEST(BarrierDevice, IsTheOneThatTheGroupIsBoundTo) {
  EXPECT_EQ(barrierDevice({.deviceIds = {}, .bound = gpu(2), .used = {gpu(1)}, .hasGpu = true}), gpu(2));
}

TEST(BarrierDevice, IsAGpuOnceTheGroupHasUsedOne) {
  EXPECT_EQ(barrierDevice({.deviceIds = {}, .bound = {}, .used = {kCpu, gpu(1), gpu(2)}, .hasGpu = true}), gpu(1));
}

TEST(BarrierDevice, IsTheCpuUntilTheGroupHasUsedAGpu) {
  EXPECT_EQ(barrierDevice({.deviceIds = {}, .bound = {}, .used = {}, .hasGpu = true}), kCpu);
  EXPECT_EQ(barrierDevice({.deviceIds = {}, .bound = kCpu, .used = {kCpu}, .hasGpu = true}), kCpu);
}

TEST(BarrierDevice, IsTheCpuWhereNumbersOfDevicesAreThoseOfCpus) {
  EXPECT_EQ(barrierDevice({.deviceIds = {0}, .bound = {}, .used = {}, .hasGpu = false}), kCpu);
}

class BarrierOfAGroup : public ::testing::Test {
 protected:
  static c10::intrusive_ptr<ProcessGroupBagua> groupOfOne() {
    return c10::make_intrusive<ProcessGroupBagua>(c10::make_intrusive<c10d::HashStore>(), 0, 1,
                                                  c10::make_intrusive<ProcessGroupBagua::Options>());
  }
};

TEST_F(BarrierOfAGroup, RunsOnTheCpuWhereNothingTellsOfAGpu) {
  const auto group = groupOfOne();
  EXPECT_TRUE(group->barrier(c10d::BarrierOptions())->wait());
  EXPECT_EQ(group->getSequenceNumberForGroup(), 1);
}

TEST_F(BarrierOfAGroup, GoesToTheDeviceThatTheGroupIsBoundTo) {
  if (BAGUA_WITH_CUDA == 0 || at::hasCUDA()) GTEST_SKIP() << "it succeeds: on the CPU without CUDA, and with a GPU";
  const auto group = groupOfOne();
  group->setBoundDeviceId(gpu(0));
  EXPECT_THROW(group->barrier(c10d::BarrierOptions()), c10::Error);
  // Nor has it been a barrier of the CPU.
  EXPECT_EQ(group->getSequenceNumberForGroup(), 0);
}

}  // namespace
}  // namespace bagua
