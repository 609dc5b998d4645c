// SPDX-License-Identifier: Apache-2.0
#include "algorithms/hook/bucket_layout.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

namespace bagua {
namespace {

c10d::GradBucket gradBucketOf(const std::vector<at::Tensor>& parameters) {
  std::vector<size_t> offsets;
  std::vector<size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  size_t numel = 0;
  for (const auto& parameter : parameters) {
    offsets.push_back(numel);
    lengths.push_back(parameter.numel());
    sizes.push_back(parameter.sizes());
    numel += parameter.numel();
  }
  return c10d::GradBucket(0, 1, at::zeros({static_cast<int64_t>(numel)}), offsets, lengths, sizes, parameters,
                          std::nullopt);
}

using Positions = std::vector<int64_t>;

TEST(BucketLayouts, WithoutParametersTheyGetPositionsInTheOrderOfTheFirstBuckets) {
  const std::vector<at::Tensor> p = {at::zeros({2}), at::zeros({3}), at::zeros({4}), at::zeros({5})};
  BucketLayouts layouts({}, 1);
  EXPECT_EQ(positionsOf(layouts.entriesOf(gradBucketOf({p[2], p[3]}))), (Positions{0, 1}));
  EXPECT_EQ(positionsOf(layouts.entriesOf(gradBucketOf({p[0], p[1]}))), (Positions{2, 3}));
  // Rebuilt.
  const auto entries = layouts.entriesOf(gradBucketOf({p[3], p[1], p[2]}));
  EXPECT_EQ(positionsOf(entries), (Positions{1, 3, 0}));
  EXPECT_EQ(entries[1].gradient.storage_offset(), 5);
  EXPECT_EQ(positionsOf(layouts.entriesOf(gradBucketOf({p[0]}))), (Positions{2}));
}

TEST(BucketLayouts, AnUnknownParameterIsRefusedWhereParametersWereGiven) {
  const std::vector<at::Tensor> p = {at::zeros({2}), at::zeros({3})};
  BucketLayouts layouts({p[0]}, 1);
  EXPECT_EQ(positionsOf(layouts.entriesOf(gradBucketOf({p[0]}))), (Positions{0}));
  EXPECT_THROW(layouts.entriesOf(gradBucketOf({p[1]})), c10::Error);
}

}  // namespace
}  // namespace bagua
