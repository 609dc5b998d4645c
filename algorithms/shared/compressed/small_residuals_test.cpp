// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/small_residuals.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

namespace bagua::compressed {
namespace {

// Parameter p has 200 + p elements.
Bucket bucketOf(const std::vector<int64_t>& positions) {
  int64_t numel = 0;
  for (const int64_t position : positions) numel += 200 + position;
  Bucket bucket{.flat = at::zeros({numel})};
  int64_t begin = 0;
  for (const int64_t position : positions) {
    bucket.entries.push_back({position, bucket.flat.narrow(0, begin, 200 + position)});
    begin += 200 + position;
  }
  return bucket;
}

std::vector<Piece> allOf(const Bucket& bucket) { return {{0, bucket.flat.numel()}}; }

using Orphans = std::vector<ParameterState::Orphan>;

at::Tensor read(SmallResiduals& state, const Bucket& bucket, const std::vector<Piece>& pieces, Orphans& orphans) {
  state.arrange(bucket, pieces, orphans);
  return state.read(bucket, pieces);
}

TEST(SmallResiduals, StayWithTheirParametersWhenBucketsAreRebuilt) {
  SmallResiduals state("sender");
  const Bucket both = bucketOf({0, 1});
  Orphans orphans;
  EXPECT_TRUE(read(state, both, allOf(both), orphans).eq(0).all().item<bool>());
  const at::Tensor values = at::arange(401, at::kFloat);
  state.write(both, allOf(both), values);
  EXPECT_EQ(state.bytes(), 401 + 4);
  const at::Tensor kept = read(state, both, allOf(both), orphans);
  EXPECT_LE((kept - values).abs().max().item<float>(), 2);
  for (const int64_t position : {1, 0}) {
    const Bucket one = bucketOf({position});
    const at::Tensor moved = read(state, one, allOf(one), orphans);
    EXPECT_LE((moved - values.narrow(0, 200 * position, 200 + position)).abs().max().item<float>(), 4);
  }
  EXPECT_TRUE(orphans.empty());
  EXPECT_EQ(state.bytes(), 401 + 4) << "nothing is held twice";
}

TEST(SmallResiduals, GiveBackWhatIsNotAskedForAgain) {
  SmallResiduals state("owner");
  const Bucket bucket = bucketOf({0});
  Orphans orphans;
  state.write(bucket, {{0, 100}}, at::full({100}, 3.0F));
  const at::Tensor other = read(state, bucket, {{60, 200}}, orphans);
  EXPECT_TRUE(other.narrow(0, 0, 40).eq(3).all().item<bool>());
  EXPECT_TRUE(other.narrow(0, 40, 100).eq(0).all().item<bool>());
  ASSERT_EQ(orphans.size(), 1);
  EXPECT_EQ(orphans[0].begin, 0);
  EXPECT_TRUE(at::equal(orphans[0].values, at::full({60}, 3.0F)));
}

TEST(SmallResiduals, ChangeTheirScaleAlsoBetweenTwoLayouts) {
  SmallResiduals state("sender");
  const Bucket both = bucketOf({0, 1});
  Orphans orphans;
  state.write(both, allOf(both), at::full({401}, 8.0F));
  for (const int64_t position : {0, 1}) {
    const Bucket one = bucketOf({position});
    // The other one's belong to no bucket while the first is at work.
    EXPECT_TRUE(read(state, one, allOf(one), orphans).eq(position == 0 ? 8 : 4).all().item<bool>());
    state.rescale(0.5);
  }
}

TEST(SmallResiduals, ContinueFromACheckpointToTheBit) {
  SmallResiduals state("sender");
  const Bucket bucket = bucketOf({0, 1});
  Orphans orphans;
  state.write(bucket, allOf(bucket), at::randn({401}));
  SmallResiduals continued("sender");
  continued.load(state.state(), {at::zeros({200}), at::zeros({201})});
  EXPECT_TRUE(at::equal(read(continued, bucket, allOf(bucket), orphans), read(state, bucket, allOf(bucket), orphans)));
  EXPECT_EQ(continued.bytes(), state.bytes());
}

}  // namespace
}  // namespace bagua::compressed
