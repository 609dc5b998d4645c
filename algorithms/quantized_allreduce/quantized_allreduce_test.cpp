// SPDX-License-Identifier: Apache-2.0
// Which gradients the options choose. What becomes of them is in tests/multiprocess/test_quantized_allreduce.py.
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "algorithms/quantized_allreduce/selection.h"

namespace bagua::quantized {
namespace {

at::Tensor matrix() { return at::zeros({64, 64}); }

TEST(Selection, KeepsExactWhatTheWordsName) {
  Selection selection("4bit", "1d, embedding,small , block?.norm*");
  selection.useParameters({{"wte.weight", "embedding"}, {"block1.norm.weight", ""}, {"fc.weight", "head"}});
  EXPECT_EQ(selection.codecOf(0, matrix()), "");
  EXPECT_EQ(selection.codecOf(1, matrix()), "");
  EXPECT_EQ(selection.codecOf(2, matrix()), "4bit");
  EXPECT_EQ(selection.codecOf(2, at::zeros({5000})), "");
  EXPECT_EQ(selection.codecOf(2, at::zeros({31, 33})), "");
  EXPECT_EQ(selection.codecOf(2, at::zeros({32, 32})), "4bit");
}

TEST(Selection, TakesTheFirstPatternThatFits) {
  Selection selection("*.bias=int8, conv*=2bit, *=1bit", "");
  selection.useParameters({{"conv1.bias", ""}, {"conv1.weight", ""}, {"fc.weight", ""}});
  EXPECT_EQ(selection.codecOf(0, at::zeros({3})), "int8");
  EXPECT_EQ(selection.codecOf(1, matrix()), "2bit");
  EXPECT_EQ(selection.codecOf(2, matrix()), "1bit");
  EXPECT_EQ(selection.codecOf(7, matrix()), "1bit") << "of a parameter without a name";
}

TEST(Selection, RefusesWhatLeavesAParameterWithoutACodec) {
  EXPECT_THROW(Selection("", "1d"), c10::ValueError);
  EXPECT_THROW(Selection("conv*=4bit", "1d"), c10::ValueError);
  EXPECT_THROW(Selection("3bit", "1d"), c10::ValueError);
}

}  // namespace
}  // namespace bagua::quantized
