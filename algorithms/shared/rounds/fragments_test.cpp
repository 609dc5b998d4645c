// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/rounds/fragments.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

namespace bagua::rounds {
namespace {

using Cut = std::vector<std::vector<int64_t>>;

TEST(Fragments, NeighboursMakeFragmentsOfAboutOneLength) {
  EXPECT_EQ(cutIntoFragments({5, 5, 5, 5}, {}, 2, Pattern::kConsecutive), (Cut{{0, 1}, {2, 3}}));
  EXPECT_EQ(cutIntoFragments({9, 1, 1, 1, 9}, {}, 3, Pattern::kConsecutive), (Cut{{0}, {1, 2, 3}, {4}}));
  EXPECT_EQ(cutIntoFragments({5, 5, 5, 5, 5}, {}, 2, Pattern::kConsecutive), (Cut{{0, 1, 2}, {3, 4}}));
}

TEST(Fragments, NoneIsEmptyWhateverTheLengths) {
  EXPECT_EQ(cutIntoFragments({100, 1, 1}, {}, 3, Pattern::kConsecutive), (Cut{{0}, {1}, {2}}));
  EXPECT_EQ(cutIntoFragments({1, 1, 100}, {}, 3, Pattern::kConsecutive), (Cut{{0}, {1}, {2}}));
  EXPECT_EQ(cutIntoFragments({0, 0, 0}, {}, 2, Pattern::kConsecutive), (Cut{{0, 1}, {2}}));
}

TEST(Fragments, LayersStayWhole) {
  EXPECT_EQ(cutIntoFragments({3, 1, 3, 1}, {0, 0, 7, 7}, 2, Pattern::kConsecutive), (Cut{{0, 1}, {2, 3}}));
  EXPECT_EQ(cutIntoFragments({3, 1, 3, 1, 3, 1}, {0, 0, 1, 1, 2, 2}, 2, Pattern::kStrided),
            (Cut{{0, 1, 4, 5}, {2, 3}}));
}

TEST(Fragments, StridedLayersGoToFragmentsInTurn) {
  EXPECT_EQ(cutIntoFragments({9, 9, 1, 1, 1}, {}, 2, Pattern::kStrided), (Cut{{0, 2, 4}, {1, 3}}));
}

TEST(Fragments, ParametersServeAsLayersWhereTheseAreTooFew) {
  EXPECT_EQ(cutIntoFragments({3, 1}, {0, 0}, 2, Pattern::kConsecutive), (Cut{{0}, {1}}));
  EXPECT_THROW(cutIntoFragments({3, 1}, {0, 0}, 3, Pattern::kConsecutive), c10::ValueError);
}

}  // namespace
}  // namespace bagua::rounds
