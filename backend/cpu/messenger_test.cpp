// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/messenger.h"

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>

#include "tests/support/two_transports.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

// Nothing here takes that long, unless it hangs.
constexpr std::chrono::seconds kLimit{20};

// Rank 0 waits for messages that rank 1 never sends.
class MessengerTest : public net::TwoTransports {
 protected:
  void SetUp() override {
    TwoTransports::SetUp();
    messenger_ = std::make_unique<Messenger>(identity_, std::make_unique<Messages>(groups_[0]),
                                             GroupHealth(identity_, nullptr).addLog("cpu"));
  }
  c10::intrusive_ptr<c10d::Work> receive() {
    const Operation operation{.type = c10d::OpType::RECV,
                              .name = "bagua:recv",
                              .dtype = at::kFloat,
                              .numel = 4,
                              .peer = 1,
                              .timeout = std::chrono::hours(1)};
    return messenger_->receive(operation, at::zeros({4}), /*tag=*/0);
  }
  static std::string errorOf(const c10::intrusive_ptr<c10d::Work>& work, milliseconds timeout) {
    try {
      work->wait(timeout);
    } catch (const std::exception& error) {
      return error.what();
    }
    return "no error";
  }

  const GroupIdentity identity_{.name = "pg", .rank = 0, .size = 2};
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

// Otherwise nobody would end one that is posted while the others are being aborted.
TEST_F(MessengerTest, AnAbortReleasesAlsoWhoWaitsForAMessageThatIsPostedLater) {
  messenger_->abort();
  EXPECT_THAT(errorOf(receive(), kLimit), HasSubstr("the message was aborted"));
}

}  // namespace
}  // namespace bagua
