// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/collectives/halves.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace bagua {
namespace {

// What each member knows of after all rounds, in the way that PartOwners takes them.
std::vector<std::multiset<int>> heardOfIn(const Halves& halves, int rounds) {
  std::vector<std::multiset<int>> known(halves.count());
  for (int member = 0; member < halves.count(); ++member) known[member] = {member};
  int level = halves.levels();
  for (const int levels : halves.levelsOfRounds(rounds)) {
    const auto before = known;
    for (int member = 0; member < halves.count(); ++member) {
      for (const int peer : halves.peersOf(member, level, levels).heard) {
        if (peer >= 0) known[member].insert(before[peer].begin(), before[peer].end());
      }
    }
    level -= levels;
  }
  EXPECT_EQ(level, 0);
  return known;
}

TEST(Halves, HaveEverybodyHearOfEachOtherOnceInAnyNumberOfRounds) {
  for (int count = 2; count <= 70; ++count) {
    const Halves halves(count);
    std::multiset<int> all;
    for (int member = 0; member < count; ++member) all.insert(member);
    for (int rounds = 1; rounds <= halves.levels(); ++rounds) {
      for (const auto& known : heardOfIn(halves, rounds)) EXPECT_EQ(known, all) << count << " in " << rounds;
    }
  }
}

TEST(Halves, LetAMemberHearFromExactlyThoseThatTellIt) {
  for (int count = 2; count <= 70; ++count) {
    const Halves halves(count);
    for (int rounds = 1; rounds <= halves.levels(); ++rounds) {
      int level = halves.levels();
      for (const int levels : halves.levelsOfRounds(rounds)) {
        std::set<std::pair<int, int>> told;
        std::set<std::pair<int, int>> heard;
        for (int member = 0; member < count; ++member) {
          const auto peers = halves.peersOf(member, level, levels);
          for (const auto& part : peers.told) {
            for (const int to : part) told.emplace(member, to);
          }
          for (const int from : peers.heard) {
            if (from >= 0) heard.emplace(from, member);
          }
        }
        EXPECT_EQ(told, heard) << count << " in " << rounds;
        level -= levels;
      }
    }
  }
}

TEST(Halves, HoldPartsWhoseSizesDifferByOneAtMost) {
  for (int count = 1; count <= 200; ++count) {
    const Halves halves(count);
    for (int level = 0; level <= halves.levels(); ++level) {
      std::set<int> sizes;
      for (int slot = 0; slot < 1 << level; ++slot) sizes.insert(halves.range(level, slot).size());
      EXPECT_LE(*sizes.rbegin() - *sizes.begin(), 1) << count << " after " << level;
    }
    EXPECT_EQ(halves.range(halves.levels(), 0).size(), 1);
  }
}

TEST(Halves, TakeMessagesThatGrowWithTheLogarithmOrTheRoot) {
  EXPECT_EQ(Halves(128).messagesIn(7), 7);
  EXPECT_EQ(Halves(128).messagesIn(2), 15 + 7);
  EXPECT_EQ(Halves(9).messagesIn(1), 8);
  EXPECT_EQ(Halves(32).leastRounds(), 1);
  EXPECT_EQ(Halves(33).leastRounds(), 2);
  EXPECT_EQ(Halves(512).leastRounds(), 2);
  for (int count = 2; count <= 300; count += count < 40 ? 1 : 29) {
    const Halves halves(count);
    for (int rounds = halves.leastRounds(); rounds <= halves.levels(); ++rounds) {
      for (int member = 0; member < count; ++member) {
        int messages = 0;
        int level = halves.levels();
        for (const int levels : halves.levelsOfRounds(rounds)) {
          for (const auto& part : halves.peersOf(member, level, levels).told) {
            messages += static_cast<int>(part.size());
          }
          level -= levels;
        }
        EXPECT_LE(messages, 2 * halves.messagesIn(rounds)) << "rank " << member << " of " << count << " in " << rounds;
      }
    }
  }
}

}  // namespace
}  // namespace bagua
