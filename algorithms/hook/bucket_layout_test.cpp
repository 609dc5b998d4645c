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
  EXPECT_EQ(positionsOf(layouts.slotsOf(gradBucketOf({p[2], p[3]}))), (Positions{0, 1}));
  EXPECT_EQ(positionsOf(layouts.slotsOf(gradBucketOf({p[0], p[1]}))), (Positions{2, 3}));
  // Rebuilt.
  const auto rebuilt = gradBucketOf({p[3], p[1], p[2]});
  const Slots slots = layouts.slotsOf(rebuilt);
  EXPECT_EQ(positionsOf(slots), (Positions{1, 3, 0}));
  EXPECT_EQ(entriesOf(rebuilt.getBuffer(), slots)[1].gradient.storage_offset(), 5);
  EXPECT_EQ(positionsOf(layouts.slotsOf(gradBucketOf({p[0]}))), (Positions{2}));
}

TEST(BucketLayouts, AnUnknownParameterIsRefusedWhereParametersWereGiven) {
  const std::vector<at::Tensor> p = {at::zeros({2}), at::zeros({3})};
  BucketLayouts layouts({p[0]}, 1);
  EXPECT_EQ(positionsOf(layouts.slotsOf(gradBucketOf({p[0]}))), (Positions{0}));
  EXPECT_THROW(static_cast<void>(layouts.slotsOf(gradBucketOf({p[1]}))), c10::Error);
}

TEST(BucketLayouts, EntriesAreLaidOutAsTheirParametersAre) {
  const std::vector<at::Tensor> p = {at::zeros({2, 3}).t(), at::zeros({4, 3}).slice(1, 0, 2)};
  BucketLayouts layouts(p, 1);
  const auto bucket = gradBucketOf(p);
  const auto entries = entriesOf(bucket.getBuffer(), layouts.slotsOf(bucket));
  EXPECT_EQ(entries[0].gradient.strides(), p[0].strides());
  EXPECT_EQ(entries[1].gradient.strides(), (at::IntArrayRef{2, 1})) << "where the parameter has gaps, row-major";
  EXPECT_EQ(entries[1].gradient.storage_offset(), 6);
}

// Steps of a process that continues from a checkpoint; the buckets that DDP has in each.
void takeSteps(BucketLayouts& layouts, const std::vector<std::vector<std::vector<at::Tensor>>>& steps) {
  for (const auto& buckets : steps) {
    for (size_t i = 0; i < buckets.size(); ++i) {
      const Slots slots = layouts.slotsOf(gradBucketOf(buckets[i]));
      layouts.note(slots, layouts.partsOf(slots), i == 0);
    }
    layouts.noteEnd();
  }
}

TEST(BucketLayouts, AreWantedUntilDdpHandsThemOverItself) {
  const std::vector<at::Tensor> p = {at::zeros({2}), at::zeros({3}), at::zeros({4})};
  const BucketLayout wanted = {{2, 1}, {0}};
  BucketLayouts layouts(p, 1);
  layouts.want(wanted);
  takeSteps(layouts, {{{p[2], p[1], p[0]}}});
  EXPECT_TRUE(layouts.wantsAny()) << "in the first step all gradients are in one bucket";
  EXPECT_EQ(layouts.last(), wanted);
  takeSteps(layouts, {{{p[2], p[1]}, {p[0]}}});
  EXPECT_FALSE(layouts.wantsAny());
  EXPECT_EQ(layouts.last(), wanted);
}

TEST(BucketLayouts, StayWantedWhereDdpHandsOverOthers) {
  const std::vector<at::Tensor> p = {at::zeros({2}), at::zeros({3}), at::zeros({4})};
  const BucketLayout wanted = {{2, 1}, {0}};
  const std::vector<std::vector<at::Tensor>> whole = {{p[2], p[1], p[0]}};
  const std::vector<std::vector<at::Tensor>> otherOrder = {{p[1], p[2]}, {p[0]}};
  for (const auto& ofDdp : {whole, otherOrder}) {
    BucketLayouts layouts(p, 1);
    layouts.want(wanted);
    takeSteps(layouts, {whole, ofDdp, ofDdp});
    EXPECT_TRUE(layouts.wantsAny());
    EXPECT_EQ(layouts.last(), wanted);
  }
}

TEST(BucketEntries, AreMadeWhenSomebodyAsks) {
  int made = 0;
  const BucketEntries entries([&made] {
    ++made;
    return std::vector<BucketEntry>{{7, at::zeros({2})}};
  });
  EXPECT_EQ(made, 0);
  EXPECT_EQ(entries.front().parameter, 7);
  EXPECT_EQ(entries.size(), 1);
  EXPECT_EQ(made, 1);
}

}  // namespace
}  // namespace bagua
