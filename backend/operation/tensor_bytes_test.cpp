// SPDX-License-Identifier: Apache-2.0
#include "backend/operation/tensor_bytes.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

namespace bagua {
namespace {

TEST(ShareBytes, TensorsThatHaveOneElementInCommonDoAndNeighboursDoNot) {
  const at::Tensor whole = at::zeros({6});
  EXPECT_TRUE(shareBytes({whole.narrow(0, 0, 4), whole.narrow(0, 3, 3)}));
  EXPECT_TRUE(shareBytes({whole.narrow(0, 5, 1), whole}));
  EXPECT_FALSE(shareBytes({whole.narrow(0, 3, 3), whole.narrow(0, 0, 3)}));
}

}  // namespace
}  // namespace bagua
