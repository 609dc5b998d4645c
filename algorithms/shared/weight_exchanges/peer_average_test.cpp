// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/weight_exchanges/peer_average.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace bagua {
namespace {

std::vector<int> peersOf(int64_t exchange, int count) {
  std::vector<int> peers;
  for (int participant = 0; participant < count; ++participant) {
    peers.push_back(shiftOnePeer(exchange, participant, count));
  }
  return peers;
}

TEST(ShiftOnePeer, IsTheScheduleOfTheOriginal) {
  EXPECT_EQ(peersOf(0, 4), (std::vector<int>{2, 3, 0, 1}));
  EXPECT_EQ(peersOf(1, 4), (std::vector<int>{3, 2, 1, 0}));
  EXPECT_EQ(peersOf(1, 8), (std::vector<int>{5, 6, 7, 4, 3, 0, 1, 2}));
}

TEST(ShiftOnePeer, TwoParticipantsMeetOneAnother) { EXPECT_EQ(peersOf(7, 2), (std::vector<int>{1, 0})); }

TEST(ShiftOnePeer, PairsEverybodyAndMeetsTheWholeOtherHalf) {
  for (const int count : {2, 4, 6, 10}) {
    std::set<int> metByTheFirst;
    for (int64_t exchange = 0; exchange < count / 2; ++exchange) {
      for (int participant = 0; participant < count; ++participant) {
        const int peer = shiftOnePeer(exchange, participant, count);
        EXPECT_NE(peer, participant);
        EXPECT_EQ(shiftOnePeer(exchange, peer, count), participant);
      }
      metByTheFirst.insert(shiftOnePeer(exchange, 0, count));
    }
    EXPECT_EQ(static_cast<int>(metByTheFirst.size()), count / 2);
  }
}

}  // namespace
}  // namespace bagua
