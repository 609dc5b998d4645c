// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/messenger.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/thrown_messages.h"
#include "tests/support/two_transports.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

// Nothing here takes that long, unless it hangs.
constexpr std::chrono::seconds kLimit{20};

// Rank 0 receives.
class MessengerTest : public net::TwoTransports {
 protected:
  void SetUp() override {
    TwoTransports::SetUp();
    messenger_ = messengerOf(0);
  }
  [[nodiscard]] std::unique_ptr<Messenger> messengerOf(int rank) const {
    const GroupIdentity identity{.name = "pg", .rank = rank, .size = 2};
    return std::make_unique<Messenger>(identity, std::make_unique<Messages>(groups_[rank]),
                                       GroupHealth(identity, nullptr).addLog("cpu"));
  }
  static Operation with(int peer, const at::Tensor& tensor) {
    return {.name = "bagua:message",
            .dtype = tensor.scalar_type(),
            .numel = tensor.numel(),
            .peer = peer,
            .timeout = std::chrono::hours(1)};
  }
  c10::intrusive_ptr<c10d::Work> receive(const at::Tensor& place = at::zeros({4})) {
    return messenger_->receive(with(1, place), place, /*tag=*/0);
  }
  static std::string errorOf(const c10::intrusive_ptr<c10d::Work>& work, milliseconds timeout) {
    return testing::messageThrownBy([&] { work->wait(timeout); });
  }

  std::unique_ptr<Messenger> messenger_;
};

TEST_F(MessengerTest, AWaitEndsAtItsOwnTimeoutWhereThatIsShorterThanTheOperations) {
  const auto work = receive();
  auto error = std::async(std::launch::async, [&] { return errorOf(work, milliseconds(10)); });
  EXPECT_EQ(error.wait_for(kLimit), std::future_status::ready);
  // It releases a wait that still goes on.
  messenger_->abort();
  EXPECT_THAT(error.get(), HasSubstr("timed out waiting for a message"));
}

TEST_F(MessengerTest, AWaitEndsAtItsOwnTimeoutWhileAnotherThreadWaitsForLonger) {
  const auto work = receive();
  auto longer = std::async(std::launch::async, [&] { return errorOf(work, kLimit); });
  // It waits by then.
  std::this_thread::sleep_for(milliseconds(100));
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(errorOf(work, milliseconds(10)), HasSubstr("timed out waiting for a message"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kLimit / 2);
  messenger_->abort();
  longer.get();
}

// Otherwise nobody would end one that is posted while the others are being aborted.
TEST_F(MessengerTest, AnAbortReleasesAlsoWhoWaitsForAMessageThatIsPostedLater) {
  messenger_->abort();
  EXPECT_THAT(errorOf(receive(), kLimit), HasSubstr("the message was aborted"));
}

TEST_F(MessengerTest, AnAbortEndsAlsoWhoAsksWhetherAMessageIsCompleted) {
  const at::Tensor large = at::zeros(int64_t{2} << 20);
  const auto works = {receive(), messenger_->send(with(1, large), large, /*tag=*/0)};
  for (const auto& work : works) EXPECT_FALSE(work->isCompleted());
  messenger_->abort();
  for (const auto& work : works) {
    EXPECT_TRUE(work->isCompleted());
    EXPECT_THAT(errorOf(work, kLimit), HasSubstr("the message was aborted"));
  }
}

// Nothing else has been said between the two.
class LeavingPeer : public MessengerTest, public ::testing::WithParamInterface<bool> {};

TEST_P(LeavingPeer, EndsEveryMessageThatWaitsForIt) {
  const bool isFirst = GetParam();
  if (isFirst) groups_[1]->leave();
  const at::Tensor place = at::zeros({4});
  // This is more than leaves before anybody receives it.
  const at::Tensor large = at::zeros(int64_t{2} << 20);
  const auto works = {receive(), messenger_->receive(with(-1, place), place, /*tag=*/1),
                      messenger_->send(with(1, large), large, /*tag=*/0)};
  std::vector<std::future<std::string>> errors;
  errors.reserve(works.size());
  for (const auto& work : works) {
    errors.push_back(std::async(std::launch::async, [&] { return errorOf(work, std::chrono::hours(1)); }));
  }
  if (!isFirst) {
    // All of them wait by then.
    std::this_thread::sleep_for(milliseconds(200));
    groups_[1]->leave();
  }
  for (auto& error : errors) {
    EXPECT_EQ(error.wait_for(kLimit), std::future_status::ready);
    if (error.wait_for(milliseconds(0)) != std::future_status::ready) messenger_->abort();
    EXPECT_THAT(error.get(), HasSubstr("rank 1 has left the group"));
  }
}

INSTANTIATE_TEST_SUITE_P(, LeavingPeer, ::testing::Bool(),
                         [](const auto& of) { return std::string(of.param ? "Before" : "Meanwhile"); });

TEST_F(MessengerTest, ReceivesFromAnyRankGetMessagesInTheOrderInWhichTheyWerePosted) {
  const auto sender = messengerOf(1);
  const at::Tensor first = at::zeros({4});
  const at::Tensor second = at::zeros({4});
  const auto firstWork = messenger_->receive(with(-1, first), first, /*tag=*/0);
  const auto secondWork = messenger_->receive(with(-1, second), second, /*tag=*/0);
  // One that nobody keeps takes no message.
  messenger_->receive(with(-1, first), at::zeros({4}), /*tag=*/0);
  const at::Tensor last = at::zeros({4});
  const auto lastWork = messenger_->receive(with(-1, last), last, /*tag=*/0);
  for (const int number : {1, 2, 3}) {
    const at::Tensor sent = at::full({4}, number, at::kFloat);
    EXPECT_EQ(errorOf(sender->send(with(0, sent), sent, /*tag=*/0), kLimit), "");
  }
  for (const auto& work : {lastWork, secondWork, firstWork}) EXPECT_EQ(errorOf(work, kLimit), "");
  EXPECT_TRUE(at::equal(first, at::full({4}, 1, at::kFloat)));
  EXPECT_TRUE(at::equal(second, at::full({4}, 2, at::kFloat)));
  EXPECT_TRUE(at::equal(last, at::full({4}, 3, at::kFloat)));
}

TEST_F(MessengerTest, AMessageGoesOnItsWayThoughItsSenderDropsTheWork) {
  const auto sender = messengerOf(1);
  // More than leaves before anybody receives it.
  const at::Tensor sent = at::arange(int64_t{2} << 20, at::kFloat);
  sender->send(with(0, sent), sent, /*tag=*/0);
  const at::Tensor received = at::zeros(sent.sizes());
  EXPECT_EQ(errorOf(receive(received), kLimit), "");
  EXPECT_TRUE(at::equal(received, sent));
}

}  // namespace
}  // namespace bagua
