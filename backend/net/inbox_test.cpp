// SPDX-License-Identifier: Apache-2.0
#include "backend/net/inbox.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "backend/net/group_table.h"

namespace bagua::net {
namespace {

// Hears what a receiver grants.
class Sender final : public FlowControl {
 public:
  void grantPlace(uint64_t /*group*/, const MessageKey& /*key*/, uint64_t /*bytes*/) override { ++places; }
  void grantCredit(uint64_t /*group*/, uint64_t bytes) override { credit += bytes; }
  int places = 0;
  uint64_t credit = 0;
};

Frame unsolicited(uint32_t index, uint32_t payloadBytes) {
  Frame frame{.kind = Frame::Kind::kUnsolicited, .total = payloadBytes, .payloadBytes = payloadBytes};
  frame.key.index = index;
  return frame;
}

TEST(UnsolicitedBudget, EveryByteThatIsReleasedIsCredited) {
  const auto sender = std::make_shared<Sender>();
  UnsolicitedBudget budget(sender, 7);
  // Sizes that gather to more than kCreditBytes.
  uint64_t released = 0;
  for (uint64_t bytes = kMostPayload - 77; released < 10 * kUnsolicitedBytes; released += bytes) {
    ASSERT_TRUE(budget.charge(bytes)) << "after " << released << " bytes";
    budget.release(bytes);
    EXPECT_LT(released + bytes - sender->credit, kCreditBytes);
  }
  budget.grantCredit();
  EXPECT_EQ(sender->credit, released);
}

TEST(UnsolicitedBudget, CreditIsNotGivenForEveryFrame) {
  const auto sender = std::make_shared<Sender>();
  UnsolicitedBudget budget(sender, 7);
  ASSERT_TRUE(budget.charge(kCreditBytes));
  budget.release(kCreditBytes - 1);
  EXPECT_EQ(sender->credit, 0);
  budget.release(1);
  EXPECT_EQ(sender->credit, kCreditBytes);
}

TEST(UnsolicitedBudget, MayBeUsedToTheLastByte) {
  UnsolicitedBudget budget(std::make_shared<Sender>(), 7);
  EXPECT_TRUE(budget.charge(kUnsolicitedBytes));
  EXPECT_FALSE(budget.charge(1));
}

// A sender may have other rules than ours.
TEST(Inbox, APeerThatSendsMoreUnsolicitedThanItMayIsRefused) {
  const auto sender = std::make_shared<Sender>();
  Inbox inbox;
  uint32_t index = 0;
  for (uint64_t charged = 0; charged + chargeOf(kMostPayload) <= kUnsolicitedBytes; charged += chargeOf(kMostPayload)) {
    ASSERT_TRUE(inbox.begin(unsolicited(++index, kMostPayload), {}, sender));
  }
  EXPECT_FALSE(inbox.begin(unsolicited(++index, kMostPayload), {}, sender));
}

TEST(Inbox, WhoTakesFromAnyRankIsNotifiedOfWhateverBegins) {
  const auto sender = std::make_shared<Sender>();
  Inbox inbox;
  const auto signal = std::make_shared<Signal>();
  EXPECT_FALSE(inbox.firstBegun({{.index = 5}}, signal));
  const uint64_t before = signal->count();
  ASSERT_TRUE(inbox.begin(unsolicited(5, 100), {}, sender));
  EXPECT_GT(signal->count(), before);
  EXPECT_EQ(inbox.firstBegun({{.index = 4}, {.index = 5}}, signal), (MessageKey{.index = 5}));
}

TEST(Inbox, WhoTakesFromAnyRankIsNotifiedOfALoss) {
  Inbox inbox;
  const auto signal = std::make_shared<Signal>();
  EXPECT_FALSE(inbox.firstBegun({{.index = 5}}, signal));
  const uint64_t before = signal->count();
  inbox.failAllOf(0, "lost");
  EXPECT_GT(signal->count(), before);
}

TEST(Inbox, OnlyNewsNotifiesUnlessProgressIsAskedFor) {
  for (const bool tellsProgress : {false, true}) {
    const auto sender = std::make_shared<Sender>();
    Inbox inbox;
    std::vector<uint8_t> memory(size_t{3} * kMostPayload);
    const auto signal = std::make_shared<Signal>();
    const auto message = inbox.find({});
    message->expectAt({.data = memory.data(),
                       .size = memory.size(),
                       .room = kEagerBytes,
                       .signal = signal,
                       .tellsProgress = tellsProgress});
    const auto countOf = [&](uint32_t part) {
      const uint64_t before = signal->count();
      Frame frame{.total = memory.size(), .offset = uint64_t{part} * kMostPayload, .payloadBytes = kMostPayload};
      EXPECT_EQ(inbox.begin(frame, {}, sender), message);
      message->end(frame);
      return signal->count() - before;
    };
    EXPECT_GT(countOf(0), 0) << "the context has come";
    EXPECT_EQ(countOf(1), tellsProgress ? 1 : 0);
    EXPECT_EQ(countOf(2), 1) << "all has come";
    EXPECT_TRUE(message->state().isComplete());
  }
}

// Several connections bring them.
TEST(Inbox, AMessageIsCompleteInWhicheverOrderItsFramesCome) {
  std::vector<uint32_t> order{0, 1, 2};
  do {
    const auto sender = std::make_shared<Sender>();
    Inbox inbox;
    std::vector<uint8_t> memory(order.size() * kMostPayload);
    const auto message = inbox.find({});
    message->expectAt({.data = memory.data(), .size = memory.size(), .room = memory.size()});
    for (const uint32_t part : order) {
      EXPECT_FALSE(message->state().isComplete());
      const Frame frame{.total = memory.size(), .offset = uint64_t{part} * kMostPayload, .payloadBytes = kMostPayload};
      ASSERT_EQ(inbox.begin(frame, {}, sender), message);
      message->end(frame);
    }
    EXPECT_TRUE(message->state().isComplete()) << "in the order " << order[0] << ", " << order[1] << ", " << order[2];
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(Inbox, TheLossOfASenderConcernsThoseThatItHasBroughtSomethingOfOrThatAreAskedFor) {
  const auto lost = std::make_shared<Sender>();
  const auto other = std::make_shared<Sender>();
  Inbox inbox;
  Frame frame = unsolicited(1, 100);
  ASSERT_TRUE(inbox.begin(frame, {}, lost));
  frame.key.source = 1;
  ASSERT_TRUE(inbox.begin(frame, {}, other));
  static_cast<void>(inbox.find({.source = 3}));
  for (const bool hasAnother : {false, true}) {
    EXPECT_TRUE(inbox.uses(*lost, 0, hasAnother));
    EXPECT_FALSE(inbox.uses(*lost, 2, hasAnother));
    EXPECT_EQ(inbox.uses(*lost, 3, hasAnother), !hasAnother) << "what is asked for comes over the other one";
  }
  inbox.failAllOver(*lost, "lost");
  EXPECT_EQ(inbox.errorOf(0), "lost");
  EXPECT_EQ(inbox.errorOf(1), "");
  EXPECT_EQ(inbox.find({.source = 0, .index = 9})->state().error, "lost");
}

TEST(GroupTable, OnlySoManyGroupsHaveWhatCameBeforeTheyWereJoined) {
  const auto sender = std::make_shared<Sender>();
  GroupTable table;
  for (uint64_t group = 0; group < GroupTable::kMostUnjoined; ++group) {
    ASSERT_TRUE(table.inboxOf(group)->begin(unsolicited(1, kMostPayload), {}, sender));
  }
  const auto joined = table.join(1);
  EXPECT_TRUE(table.inboxOf(1000)) << "there is room for one more since a group was joined";
  EXPECT_TRUE(table.inboxOf(0));
  EXPECT_TRUE(table.inboxOf(1001));
  EXPECT_FALSE(table.inboxOf(0)) << "the oldest was dropped";
  EXPECT_TRUE(table.inboxOf(1002));
  EXPECT_FALSE(table.inboxOf(2)) << "and then the next";
  EXPECT_EQ(table.inboxOf(1), joined);
  EXPECT_TRUE(table.inboxOf(3));
  EXPECT_THROW(table.join(0), c10::DistNetworkError);
}

// The frames that it was told of over those others may still be on their way.
TEST(GroupTable, APeerIsToHearOnceThatAGroupWasLeftAndNotWhereItHasBeenTold) {
  constexpr uint64_t kGroup = 1;
  constexpr uint64_t kTold = 5;
  constexpr uint64_t kOther = 6;
  GroupTable table;
  EXPECT_FALSE(table.isToHear(kGroup, kOther)) << "nobody has left";
  const auto inbox = table.join(kGroup);
  EXPECT_FALSE(table.isToHear(kGroup, kOther));
  EXPECT_FALSE(inbox->isClosed());
  EXPECT_EQ(table.leave(kGroup, {kTold}), inbox);
  EXPECT_TRUE(inbox->isClosed());
  EXPECT_FALSE(table.isToHear(kGroup, kTold));
  EXPECT_TRUE(table.isToHear(kGroup, kOther));
  EXPECT_FALSE(table.isToHear(kGroup, kOther));
}

TEST(GroupTable, AnAbandonedGroupKeepsNothingUnlessItWasJoined) {
  GroupTable table;
  const std::weak_ptr<Inbox> unused = table.inboxOf(1);
  table.abandon(1);
  EXPECT_TRUE(unused.expired());
  EXPECT_FALSE(table.inboxOf(1)) << "what still comes is thrown away";
  const auto inbox = table.join(2);
  table.add(2, nullptr);
  table.abandon(2);
  EXPECT_EQ(table.inboxOf(2), inbox);
  table.leave(2, {});
  EXPECT_FALSE(table.inboxOf(2));
}

}  // namespace
}  // namespace bagua::net
