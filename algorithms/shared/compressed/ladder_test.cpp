// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/ladder.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <string>

#include "kernels/codec.h"

namespace bagua::compressed {
namespace {

TEST(Ladder, GoesByBitsUpToFloat32) {
  EXPECT_EQ(finerThan("1bit", 0), "1bit");
  EXPECT_EQ(finerThan("1bit", 1), "2bit");
  EXPECT_EQ(finerThan("1bit", 2), "4bit");
  EXPECT_EQ(finerThan("1bit", 3), "int8");
  EXPECT_EQ(finerThan("1bit", 4), "");
  EXPECT_EQ(finerThan("int8", 7), "");
  EXPECT_EQ(finerThan("minmax_uint8", 1), "int8");
}

// On normal numbers a codec loses much less than it may, and the next one with fewer bits as much.
TEST(Ladder, WhatACodecMayLoseIsWhatTheNextCoarserOneLosesOfNormalNumbers) {
  const auto lossOf = [](const std::string& name) {
    const auto& codec = *CodecRegistry::find(name).codec;
    const at::Tensor values = at::randn({1 << 16});
    at::Tensor packed = at::empty({codec.layout().packedBytes(values.numel())}, at::kByte);
    at::Tensor decoded = at::zeros_like(values);
    codec.start(values, {.key = 3}, packed);
    codec.encode(values, {0, values.numel()}, {.key = 3}, packed);
    codec.decode(packed, {0, values.numel()}, decoded);
    return ((decoded - values).square().sum() / values.square().sum()).item<double>();
  };
  std::string coarser = "1bit";
  EXPECT_EQ(soundLossOf(coarser), 1);
  for (const std::string codec : {"2bit", "4bit", "int8"}) {
    EXPECT_NEAR(soundLossOf(codec), lossOf(coarser), 0.05 * lossOf(coarser)) << codec;
    EXPECT_LT(lossOf(codec), 0.5 * soundLossOf(codec)) << codec;
    coarser = codec;
  }
  EXPECT_EQ(soundLossOf("minmax_uint8"), soundLossOf("int8"));
}

}  // namespace
}  // namespace bagua::compressed
