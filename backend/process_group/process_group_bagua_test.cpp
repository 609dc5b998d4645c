// SPDX-License-Identifier: Apache-2.0
#include "backend/process_group/process_group_bagua.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/eye.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "backend/net/transport.h"
#include "backend/process_group/work_bagua.h"
#include "backend/rendezvous/rank_record.h"
#include "tests/support/thrown_messages.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using testing::messageThrownBy;
using StorePtr = ProcessGroupBagua::StorePtr;

c10::intrusive_ptr<ProcessGroupBagua> groupOfOne() {
  return c10::make_intrusive<ProcessGroupBagua>(c10::make_intrusive<c10d::HashStore>(), 0, 1,
                                                c10::make_intrusive<ProcessGroupBagua::Options>());
}

// Another operation would be taken for a sum.
TEST(ProcessGroupBagua, ReducesSparseTensorsToSumsAndMeansOnly) {
  const auto group = groupOfOne();
  std::vector<at::Tensor> tensors{at::eye(2).to_sparse()};
  c10d::AllreduceOptions options;
  for (const auto op : {c10d::ReduceOp::SUM, c10d::ReduceOp::AVG}) {
    options.reduceOp = op;
    EXPECT_TRUE(group->allreduce(tensors, options)->wait());
    EXPECT_TRUE(at::equal(tensors[0].to_dense(), at::eye(2)));
  }
  for (const auto op : {c10d::ReduceOp::PRODUCT, c10d::ReduceOp::MIN, c10d::ReduceOp::MAX}) {
    options.reduceOp = op;
    EXPECT_THROW(group->allreduce(tensors, options), c10::ValueError);
  }
}

class LatePart final : public c10d::Work {
 public:
  bool wait(milliseconds timeout) override {
    given.push_back(timeout);
    std::this_thread::sleep_for(milliseconds(20));
    return true;
  }
  std::vector<milliseconds> given;
};

TEST(GroupWork, HasOneTimeoutForAllOfItsParts) {
  const auto part = c10::make_intrusive<LatePart>();
  GroupWork work(0, {part, part, part});
  EXPECT_TRUE(work.wait(std::chrono::seconds(10)));
  ASSERT_EQ(part->given.size(), 3U);
  EXPECT_LE(part->given[1], milliseconds(9'980));
  EXPECT_LE(part->given[2], milliseconds(9'960));
  EXPECT_TRUE(work.wait(milliseconds(1))) << "none is given 0, which is no limit";
  EXPECT_EQ(part->given.back(), milliseconds(1));
  EXPECT_TRUE(work.wait(kNoTimeout));
  EXPECT_EQ(part->given.back(), kNoTimeout);
}

TEST(ProcessGroupBagua, SaysHowItEndedAtFirst) {
  const auto group = groupOfOne();
  group->abort();
  group->shutdown();
  EXPECT_THAT(messageThrownBy<c10::DistBackendError>([&] { group->barrier(c10d::BarrierOptions()); }),
              HasSubstr("was aborted"));
}

TEST(ProcessGroupBagua, TakesPositiveTimeoutsOnly) {
  const auto group = groupOfOne();
  group->setTimeout(milliseconds(700));
  for (const int wrong : {0, -1}) EXPECT_THROW(group->setTimeout(milliseconds(wrong)), c10::ValueError);
  EXPECT_EQ(group->timeout(), milliseconds(700));
}

// Only a negative one stands for that of the group.
TEST(ProcessGroupBagua, ACallThatIsGivenNoTimeAtAllEndsAtOnce) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  // Rank 1 listens, as another thread of this process, and never calls.
  const auto absent = net::Transport::listenAt("127.0.0.1", 1);
  store->set("thread/1", absent->address().toString());
  const auto options = c10::make_intrusive<ProcessGroupBagua::Options>(milliseconds(5000));
  options->records = {ownRecord(), ownRecord()};
  const auto group = c10::make_intrusive<ProcessGroupBagua>(store, 0, 2, options);
  c10d::BarrierOptions noTime;
  noTime.timeout = milliseconds(0);
  EXPECT_THAT(messageThrownBy<c10::DistBackendError>([&] { group->monitoredBarrier(noTime, /*waitAllRanks=*/false); }),
              HasSubstr("in monitoredBarrier after 0 ms"));
}

TEST(ProcessGroupBagua, EndsACoalescingInWhichAMessageWasRefusedWithoutAWork) {
  const auto group = groupOfOne();
  group->startCoalescing();
  std::vector<at::Tensor> toItself{at::eye(2)};
  EXPECT_THROW(group->send(toItself, 0, 0), c10::ValueError);
  EXPECT_FALSE(group->endCoalescing());
  EXPECT_THAT(messageThrownBy([&] { group->endCoalescing(); }), HasSubstr("without a start"));
}

// torch writes the name and the timeout of a child into them.
TEST(ProcessGroupBagua, HandsOutCopiesOfItsOptions) {
  const auto group = groupOfOne();
  group->getBackendOptions()->timeout = milliseconds(1);
  EXPECT_NE(group->timeout(), milliseconds(1));
}

// Rank 1 of two, which the whole job calls 4 and 9, as if both had met.
c10::intrusive_ptr<ProcessGroupBagua> partOfAJob(const StorePtr& store) {
  const auto options = c10::make_intrusive<ProcessGroupBagua::Options>();
  options->global_ranks_in_group = {4, 9};
  options->records = {ownRecord(), ownRecord()};
  return c10::make_intrusive<ProcessGroupBagua>(store, 1, 2, options);
}

// The flight recorder names ranks as the whole job does.
TEST(ProcessGroupBagua, GroupsThatAreMadeOfItNameTheirRanksAsTheWholeJobDoes) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto group = partOfAJob(store);
  for (const auto& child : {group->shrinkTo({0}, /*flags=*/0, group->getBackendOptions()),
                            group->split(store, {1}, group->getBackendOptions())}) {
    EXPECT_EQ(child->getRank(), 0);
    EXPECT_EQ(child->getSize(), 1);
    EXPECT_EQ(child->getBackendOptions()->global_ranks_in_group, std::vector<uint64_t>{9});
  }
}

// The parent's list would be too short for it.
TEST(ProcessGroupBagua, AMergedGroupHasNoListOfRanks) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto group = partOfAJob(store);
  const auto merged = group->merge(store, group->getBackendOptions(), 0, 1);
  EXPECT_TRUE(merged->getBackendOptions()->global_ranks_in_group.empty());
}

}  // namespace
}  // namespace bagua
