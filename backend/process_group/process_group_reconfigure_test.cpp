// SPDX-License-Identifier: Apache-2.0
// A change of members among groups of one process.
#include "backend/process_group/process_group_bagua.h"

#if BAGUA_HAS_RECONFIGURE

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "backend/rendezvous/member_handle.h"
#include "backend/rendezvous/rank_record.h"
#include "tests/support/thrown_messages.h"

namespace bagua {
namespace {

using ::testing::HasSubstr;
using testing::messageThrownBy;

class ReconfigureTest : public ::testing::Test {
 protected:
  static constexpr int64_t kUuid = 7;
  // Nothing here takes that long, unless it hangs.
  static constexpr std::chrono::seconds kLimit{20};

  static c10::intrusive_ptr<ProcessGroupBagua> newMember() {
    auto options = c10::make_intrusive<ProcessGroupBagua::Options>();
    options->waitsForReconfigure = true;
    return c10::make_intrusive<ProcessGroupBagua>(c10::make_intrusive<c10d::HashStore>(), 0, 1, options);
  }

  static c10d::ReconfigureOptions changeTo(const std::vector<std::string>& handles, std::chrono::milliseconds timeout) {
    c10d::ReconfigureOptions options;
    options.uuid = kUuid;
    options.handles = handles;
    options.timeout = timeout;
    return options;
  }

  // The part of the first member's store in which the members of this change meet.
  [[nodiscard]] c10d::PrefixStore meetingPlace() const {
    const MemberHandle server = MemberHandle::parse(handles_[0]);
    return c10d::PrefixStore(c10::str("epoch/", server.token, "/", kUuid), server.connect(kLimit));
  }

  const c10::intrusive_ptr<ProcessGroupBagua> first_ = newMember();
  const c10::intrusive_ptr<ProcessGroupBagua> second_ = newMember();
  const std::vector<std::string> handles_ = {first_->get_reconfigure_handle(), second_->get_reconfigure_handle()};
};

// The first member would begin alone: it finds what the other has left in the store.
TEST_F(ReconfigureTest, AMemberThatComesWhenAnotherHasGivenUpBeginsNothing) {
  c10d::PrefixStore met = meetingPlace();
  // What the first one writes on its way to the last meeting, where the second one then waits for it.
  met.set("handles", c10::Join(" ", handles_));
  met.set("host/0", ownRecord());
  auto waiting = std::async(std::launch::async, [&] { second_->reconfigure(changeTo(handles_, kLimit)); });
  const auto hasEnded = [&] { return waiting.wait_for(std::chrono::milliseconds(1)) == std::future_status::ready; };
  while (met.add("met", 0) == 0 && !hasEnded()) continue;
  second_->abort();
  EXPECT_THROW(waiting.get(), c10::DistBackendError);
  // A thread of its own says so in the store. On a busy machine it does that a moment later.
  const auto end = std::chrono::steady_clock::now() + kLimit;
  while (met.add("left", 0) == 0 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  EXPECT_THROW(first_->reconfigure(changeTo(handles_, std::chrono::milliseconds(500))), c10::DistBackendError);
}

TEST_F(ReconfigureTest, AMemberThatWasShutDownBeginsNothing) {
  first_->shutdown();
  EXPECT_THAT(messageThrownBy<c10::DistBackendError>([&] { first_->reconfigure(changeTo({handles_[0]}, kLimit)); }),
              HasSubstr("has been shut down"));
}

// They would wait for each other until the timeout.
TEST_F(ReconfigureTest, AMemberThatWasGivenOtherHandlesThanTheFirstOneSaysBoth) {
  c10d::PrefixStore met = meetingPlace();
  met.set("handles", "others");
  EXPECT_THAT(messageThrownBy<c10::ValueError>([&] { second_->reconfigure(changeTo(handles_, kLimit)); }),
              HasSubstr("rank 0 was given the members others, and rank 1 " + c10::Join(" ", handles_)));
}

}  // namespace
}  // namespace bagua

#endif
