// SPDX-License-Identifier: Apache-2.0
#include "algorithms/hook/gradients_left.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace bagua {
namespace {

constexpr float kNotANumber = std::numeric_limits<float>::quiet_NaN();

TEST(GradientsLeft, SparseOnesAreFiniteIfTheirValuesAreAndGoneWithTheLastOfThem) {
  const at::Tensor parameter = at::zeros({3});
  GradientsLeft gradients({parameter});
  EXPECT_TRUE(gradients.areFinite()) << "there is none";
  for (const float value : {1.0F, std::numeric_limits<float>::infinity(), kNotANumber}) {
    parameter.mutable_grad() = at::tensor({0.0F, value, 2.0F}).to_sparse();
    EXPECT_EQ(gradients.areFinite(), value == 1) << value;
  }
  gradients.note();
  // Kept, lest another one is found in its place in memory.
  const std::vector<at::Tensor> kept = {parameter.grad()};
  EXPECT_FALSE(gradients.haveGone());
  parameter.mutable_grad() = at::tensor({0.0F, 0.0F, 2.0F}).to_sparse();
  EXPECT_FALSE(gradients.haveGone());
  parameter.mutable_grad() = at::zeros({3}).to_sparse();
  EXPECT_TRUE(gradients.haveGone());
}

}  // namespace
}  // namespace bagua
