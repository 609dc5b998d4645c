// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/tag_counts.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace bagua {
namespace {

TEST(TagCounts, AreThoseOfEachTag) {
  std::mt19937 random(7);
  TagCounts counts;
  std::map<int, uint32_t> expected;
  for (int message = 0; message < 20'000; ++message) {
    const int tag = static_cast<int>(random() % 200);
    EXPECT_EQ(counts.add(tag), expected[tag]++);
  }
  for (int tag = -1; tag <= 200; ++tag) EXPECT_EQ(counts.of(tag), expected[tag]) << "tag " << tag;
}

TEST(TagCounts, DoNotGrowWithTagsThatCountUpOrDown) {
  TagCounts up;
  TagCounts down;
  for (int tag = 0; tag < 100'000; ++tag) {
    EXPECT_EQ(up.add(tag), 0);
    EXPECT_EQ(down.add(100'000 - tag), 0);
  }
  EXPECT_EQ(up.entries(), 1);
  EXPECT_EQ(down.entries(), 1);
  // The first half once more.
  for (int tag = 0; tag < 50'000; ++tag) EXPECT_EQ(up.add(tag), 1);
  EXPECT_EQ(up.entries(), 2);
  EXPECT_EQ(up.of(49'999), 2);
  EXPECT_EQ(up.of(50'000), 1);
}

}  // namespace
}  // namespace bagua
