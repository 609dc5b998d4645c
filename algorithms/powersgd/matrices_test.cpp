// SPDX-License-Identifier: Apache-2.0
#include "algorithms/powersgd/matrices.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "algorithms/powersgd/starting_factors.h"
#include "kernels/device_ways.h"

namespace bagua::powersgd {
namespace {

TEST(Matrices, AGradientIsTheMatrixOfItsFirstDimensionAgainstTheOthers) {
  const Worth worth{.rank = 4, .minCompression = 2};
  const auto of = [&](const at::Tensor& gradient) { return *matrixOf(gradient, worth); };
  EXPECT_EQ(of(at::zeros({64, 32})), (Shape{64, 32, 4}));
  EXPECT_EQ(of(at::zeros({64, 3, 5, 5})), (Shape{64, 75, 4}));
  EXPECT_EQ(of(at::zeros({64, 8, 5, 5}).contiguous(at::MemoryFormat::ChannelsLast)), (Shape{64, 200, 4}));
  EXPECT_EQ(of(at::zeros({64, 32}).t()), (Shape{64, 32, 4})) << "as it lies in memory";
  for (const auto& sizes :
       std::vector<std::vector<int64_t>>{{}, {1000}, {0, 64}, {64, 0}, {1, 1000}, {1000, 1}, {8, 16}}) {
    EXPECT_FALSE(matrixOf(at::zeros(sizes), worth)) << c10::str(at::IntArrayRef(sizes));
  }
  // 2 * (rows + columns) * rank against rows * columns.
  EXPECT_FALSE(matrixOf(at::zeros({16, 16}), {.rank = 4, .minCompression = 2}));
  EXPECT_TRUE(matrixOf(at::zeros({16, 16}), {.rank = 4, .minCompression = 1.99}));
  // Of no more columns than the matrix has.
  EXPECT_EQ(matrixOf(at::zeros({100, 3}), {.rank = 8, .minCompression = 0.5}), (Shape{100, 3, 3}));
}

// The device may read them later, and they are memory of another stream.
TEST(StartingFactors, OfACheckpointAreRetainedForTheDeviceWhenOthersTakeTheirPlace) {
  const AsOnDevice onDevice;
  const MatrixGroup group{{.rows = 20, .columns = 10, .rank = 2}, {{0, {0, 200}}}};
  StartingFactors starts(true, 0);
  starts.load({{"q.0", at::ones({2, 10})}}, {}, {.rank = 2});
  const at::Tensor start = starts.startOf(group, 0, at::kFloat);
  Bucket::Retained retained;
  starts.keep(group, at::zeros({1, 2, 10}), retained);
  ASSERT_EQ(retained.size(), 1);
  EXPECT_TRUE(at::equal(retained.front(), start[0]));
}

}  // namespace
}  // namespace bagua::powersgd
