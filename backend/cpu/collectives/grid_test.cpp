// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/collectives/grid.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace bagua {
namespace {

TEST(Grid, HasOneWayFromEachMemberToEachColumn) {
  for (int count = 1; count <= 70; ++count) {
    const Grid grid(count);
    for (int column = 0; column < std::min(grid.columns(), count); ++column) {
      std::multiset<int> sources;
      for (const int relay : grid.membersOf(column)) {
        EXPECT_EQ(grid.columnOf(relay), column);
        const auto own = grid.sourcesOf(relay);
        EXPECT_TRUE(std::find(own.begin(), own.end(), relay) != own.end()) << relay << " of " << count;
        sources.insert(own.begin(), own.end());
      }
      EXPECT_EQ(sources.size(), count);
      EXPECT_EQ(std::set<int>(sources.begin(), sources.end()).size(), count);
    }
  }
}

TEST(Grid, TakesMessagesThatGrowWithTheRoot) {
  EXPECT_EQ(Grid(16).messages(), 3 + 3);
  EXPECT_EQ(Grid(128).messages(), 11 + 10);
  EXPECT_EQ(Grid(512).messages(), 22 + 22);
  for (int count = 2; count <= 530; count += count < 70 ? 1 : 92) {
    const Grid grid(count);
    EXPECT_GE(grid.columns() * grid.columns(), count);
    EXPECT_LT((grid.columns() - 1) * (grid.columns() - 1), count);
    for (int member = 0; member < count; ++member) {
      std::set<int> relays;
      for (int column = 0; column < grid.columns(); ++column) relays.insert(grid.relayOf(member, column));
      relays.erase(member);
      const auto last = static_cast<int>(grid.membersOf(grid.columnOf(member)).size()) - 1;
      EXPECT_LE(static_cast<int>(relays.size()) + last, grid.messages()) << member << " of " << count;
      // Of its own row, and what the last one cannot do by itself.
      if (count > 4) {
        EXPECT_LE(grid.sourcesOf(member).size(), grid.columns() + 2) << member << " of " << count;
      }
    }
  }
}

}  // namespace
}  // namespace bagua
