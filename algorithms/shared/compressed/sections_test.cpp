// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/sections.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <string>

namespace bagua::compressed {
namespace {

// 64 numbers from 1 on, of which the first are those of parameter 0.
Bucket bucketWithOthers(int64_t others) {
  const at::Tensor flat = at::arange(1, 65, at::kFloat);
  return {.flat = flat, .entries = {{0, flat.narrow(0, 0, others)}, {1, flat.narrow(0, others, 64 - others)}}};
}

std::vector<CodecSection> dividedByCodec(const Bucket& bucket) {
  return sectionsOf(bucket, [](const BucketEntry& entry) { return std::string(entry.parameter == 0 ? "" : "4bit"); });
}

// A codec codes their places for nothing, so that nothing in them may widen the scales of the elements beside them.
TEST(Sections, TheOneThatKeepsTheBucketsTensorHasZerosInThePlacesOfOthers) {
  const Bucket bucket = bucketWithOthers(2);
  const auto sections = dividedByCodec(bucket);
  ASSERT_EQ(sections.size(), 2);
  EXPECT_EQ(sections[0].codec, "4bit");
  EXPECT_TRUE(sections[0].flat.is_same(bucket.flat));
  EXPECT_TRUE(bucket.flat.narrow(0, 0, 2).eq(0).all().item<bool>());
  EXPECT_TRUE(at::equal(sections[1].flat, at::arange(1, 3, at::kFloat)));
  for (const auto& section : sections) section.scatterTo(bucket.flat);
  EXPECT_TRUE(at::equal(bucket.flat, at::arange(1, 65, at::kFloat)));
}

TEST(Sections, OfMoreOthersEachHasATensorOfItsOwn) {
  const Bucket bucket = bucketWithOthers(3);
  const auto sections = dividedByCodec(bucket);
  ASSERT_EQ(sections.size(), 2);
  EXPECT_FALSE(sections[0].flat.is_alias_of(bucket.flat));
  EXPECT_TRUE(at::equal(sections[0].flat, at::arange(4, 65, at::kFloat)));
  EXPECT_TRUE(at::equal(bucket.flat, at::arange(1, 65, at::kFloat)));
}

}  // namespace
}  // namespace bagua::compressed
