// SPDX-License-Identifier: Apache-2.0
#include "backend/process_group/process_group_bagua.h"

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "backend/rendezvous/rank_record.h"

namespace bagua {
namespace {

// The flight recorder names ranks as the whole job does, also those of a group that was only a part of it.
TEST(ProcessGroupBagua, AGroupThatHasShrunkNamesItsRanksAsTheWholeJobDoes) {
  const auto options = c10::make_intrusive<ProcessGroupBagua::Options>();
  options->global_ranks_in_group = {4, 9};
  // As if both had met.
  options->records = {ownRecord(), ownRecord()};
  const auto group = c10::make_intrusive<ProcessGroupBagua>(c10::make_intrusive<c10d::HashStore>(), 1, 2, options);
  const auto meetThere = [](const ProcessGroupBagua::StorePtr& store, int, int) { return store; };
  const auto shrunk = group->shrinkTo({0}, /*flags=*/0, group->getBackendOptions(), meetThere);
  EXPECT_EQ(shrunk->getRank(), 0);
  EXPECT_EQ(shrunk->getSize(), 1);
  EXPECT_EQ(shrunk->getBackendOptions()->global_ranks_in_group, std::vector<uint64_t>{9});
}

}  // namespace
}  // namespace bagua
