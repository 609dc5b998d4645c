// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/parameter_state.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <thread>

#include "kernels/device_ways.h"

namespace bagua {
namespace {

// The elements of parameter p: 3 + p.
Bucket bucketOf(const std::vector<int64_t>& positions) {
  int64_t numel = 0;
  for (const int64_t position : positions) numel += 3 + position;
  Bucket bucket{.flat = at::zeros({numel}, at::kBFloat16)};
  int64_t begin = 0;
  for (const int64_t position : positions) {
    bucket.entries.push_back({position, bucket.flat.narrow(0, begin, 3 + position)});
    begin += 3 + position;
  }
  return bucket;
}

// 100 p, 100 p + 1, ...
at::Tensor valuesOf(int64_t position) { return at::arange(3 + position, at::kFloat) + 100.0 * position; }

at::Tensor valuesOfAll(const std::vector<int64_t>& positions) {
  std::vector<at::Tensor> values;
  for (const int64_t position : positions) values.push_back(valuesOf(position));
  return at::cat(values);
}

TEST(ParameterState, BeginsWithZerosOfFloat32AndStaysTheSameMemory) {
  ParameterState state("residual");
  const Bucket bucket = bucketOf({2, 0});
  const at::Tensor flat = state.flatFor(bucket);
  EXPECT_EQ(flat.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(flat, at::zeros({8})));
  EXPECT_TRUE(state.flatFor(bucketOf({2, 0})).is_same(flat));
}

TEST(ParameterState, ValuesStayWithTheirParametersWhenBucketsAreRebuilt) {
  ParameterState state("residual");
  state.flatFor(bucketOf({0, 1, 2, 3})).copy_(valuesOfAll({0, 1, 2, 3}));
  const at::Tensor last = state.flatFor(bucketOf({3, 1}));
  EXPECT_TRUE(at::equal(last, valuesOfAll({3, 1})));
  EXPECT_TRUE(at::equal(state.flatFor(bucketOf({2})), valuesOf(2)));
  // Of parameter 0 nobody has asked since. What the others have written goes along.
  last.mul_(2);
  EXPECT_TRUE(at::equal(state.flatFor(bucketOf({0, 1, 2, 3})),
                        at::cat({valuesOf(0), 2 * valuesOf(1), valuesOf(2), 2 * valuesOf(3)})));
  EXPECT_TRUE(state.takeOrphans(bucketOf({0, 1, 2, 3})).empty());
}

TEST(ParameterState, PiecesKeepWhatIsStillInThemAndGiveBackTheRest) {
  ParameterState state("owner");
  // Parameter 1 is at 0 to 4, parameter 2 at 4 to 9: elements 1 to 4 of the one, 0 to 3 of the other.
  const at::Tensor flat = state.flatFor(bucketOf({1, 2}), {{1, 3}, {3, 7}});
  flat.copy_(at::arange(6, at::kFloat) + 10);
  EXPECT_TRUE(state.flatFor(bucketOf({1, 2}), {{1, 3}, {3, 7}}).is_same(flat));
  // Now parameter 2 is at 0 to 5, and parameter 1 at 5 to 9: elements 2 to 5 and 0 to 2.
  const Bucket rebuilt = bucketOf({2, 1});
  EXPECT_TRUE(at::equal(state.flatFor(rebuilt, {{2, 7}}), at::tensor({15.0F, 0.0F, 0.0F, 0.0F, 10.0F})));
  const auto orphans = state.takeOrphans(rebuilt);
  ASSERT_EQ(orphans.size(), 3);
  at::Tensor places = at::zeros({9});
  for (const auto& orphan : orphans) places.narrow(0, orphan.begin, orphan.values.numel()).add_(orphan.values);
  EXPECT_TRUE(at::equal(places, at::tensor({13.0F, 14.0F, 0.0F, 0.0F, 0.0F, 0.0F, 0.0F, 11.0F, 12.0F})));
  EXPECT_TRUE(state.takeOrphans(rebuilt).empty());
}

TEST(ParameterState, OrphansThatNobodyTookComeBackWithTheirElements) {
  ParameterState state("owner");
  const Bucket bucket = bucketOf({2});
  state.flatFor(bucket, {{0, 5}}).copy_(valuesOf(2));
  EXPECT_TRUE(at::equal(state.flatFor(bucket, {{3, 4}}), valuesOf(2).narrow(0, 3, 1)));
  EXPECT_TRUE(at::equal(state.flatFor(bucket, {{0, 5}}), valuesOf(2)));
  EXPECT_TRUE(state.takeOrphans(bucket).empty());
}

TEST(ParameterState, AnotherRunContinuesWithOtherBuckets) {
  ParameterState whole("residual");
  ParameterState part("residual.owner");
  whole.flatFor(bucketOf({0, 1})).copy_(valuesOfAll({0, 1}));
  part.flatFor(bucketOf({0, 1}), {{2, 5}}).copy_(at::tensor({1.0F, 2.0F, 3.0F}));
  AlgorithmState saved = whole.state();
  EXPECT_EQ(saved.size(), 2);
  saved.merge(part.state());
  // What was taken is a copy.
  whole.flatFor(bucketOf({0, 1})).zero_();

  ParameterState continued("residual");
  ParameterState continuedPart("residual.owner");
  const std::vector<at::Tensor> parameters = {at::zeros({3}), at::zeros({2, 2})};
  continued.load(saved, parameters);
  continuedPart.load(saved, {});
  EXPECT_TRUE(at::equal(continued.flatFor(bucketOf({1, 0})), valuesOfAll({1, 0})));
  EXPECT_TRUE(at::equal(continuedPart.flatFor(bucketOf({1, 0}), {{0, 7}}),
                        at::tensor({2.0F, 3.0F, 0.0F, 0.0F, 0.0F, 0.0F, 1.0F})));
}

// The device may read them after flatFor() has returned, and they are memory of another stream.
TEST(ParameterState, TheBucketThatReadsACheckpointRetainsItForTheDevice) {
  const AsOnDevice onDevice;
  ParameterState state("residual");
  state.load({{"residual.0", valuesOf(0)}, {"residual.1", valuesOf(1)}}, {});
  const Bucket bucket = bucketOf({1, 0});
  const at::Tensor flat = state.flatFor(bucket);
  ASSERT_EQ(bucket.retained->size(), 2);
  for (const int64_t position : {0, 1}) {
    const at::Tensor& loaded = bucket.retained->at(position);
    EXPECT_TRUE(at::equal(loaded, valuesOf(position)));
    EXPECT_FALSE(loaded.is_alias_of(flat));
  }
  state.flatFor(bucket);
  EXPECT_EQ(bucket.retained->size(), 2);
}

TEST(ParameterState, WhatDoesNotFitTheModelIsAValueError) {
  const auto refuses = [](const AlgorithmState& state) {
    ParameterState loaded("residual");
    EXPECT_THROW(loaded.load(state, {at::zeros({3}), at::zeros({4})}), c10::ValueError);
  };
  refuses({{"residual.2", at::zeros({3})}});
  refuses({{"residual.1", at::zeros({3})}});
  refuses({{"residual.1", at::zeros({4}, at::kHalf)}});
  refuses({{"residual.1", at::zeros({2, 2})}});
  for (const auto& pieces :
       {at::tensor({3, 5}, at::kLong), at::tensor({0, 1}, at::kLong), at::tensor({-1, 1}, at::kLong)})
    refuses({{"residual.1", at::zeros({2})}, {"residual.1.pieces", pieces.view({1, 2})}});
  refuses({{"residual.1", at::zeros({2})}, {"residual.1.pieces", at::zeros({2})}});
  // Without parameters it is found at the first bucket.
  ParameterState loaded("residual");
  loaded.load({{"residual.0", at::zeros({4})}}, {});
  EXPECT_THROW(loaded.flatFor(bucketOf({0})), c10::ValueError);
}

TEST(ParameterState, TakesWhatStateGivesAndNothingElse) {
  ParameterState owner("owner.codec");
  owner.flatFor(bucketOf({0, 1}), {{2, 5}});
  const AlgorithmState saved = owner.state();
  EXPECT_EQ(saved.size(), 4);
  for (const auto& [name, values] : saved) EXPECT_TRUE(owner.takes(name, saved)) << name;
  AlgorithmState foreign = saved;
  for (const char* const name : {"zz", "owner.codec", "owner.codec.", "owner.codec.-1", "owner.codec.7.pieces",
                                 "owner.codec.0.pieces.pieces", "owner.codec2.0", "sender.codec.0"}) {
    foreign[name] = at::zeros({1});
    EXPECT_FALSE(owner.takes(name, foreign)) << name;
  }
}

TEST(ParameterState, BucketsMayBeAtWorkAtOnce) {
  ParameterState state("residual");
  state.flatFor(bucketOf({0, 1, 2, 3})).copy_(valuesOfAll({0, 1, 2, 3}));
  const auto work = [&](const std::vector<int64_t>& positions) {
    for (int step = 0; step < 200; ++step) state.flatFor(bucketOf(positions)).add_(1);
  };
  std::thread other(work, std::vector<int64_t>{2, 0});
  work({1, 3});
  other.join();
  EXPECT_TRUE(at::equal(state.flatFor(bucketOf({0, 1, 2, 3})), valuesOfAll({0, 1, 2, 3}) + 200));
}

TEST(BucketKey, DiffersBetweenStepsAndBucketsAndSeeds) {
  const uint64_t key = bucketKey(0, 7, 3);
  EXPECT_EQ(key, bucketKey(0, 7, 3));
  EXPECT_NE(key, bucketKey(0, 8, 3));
  EXPECT_NE(key, bucketKey(0, 7, 2));
  EXPECT_NE(key, bucketKey(1, 7, 3));
}

}  // namespace
}  // namespace bagua
