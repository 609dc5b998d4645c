// SPDX-License-Identifier: Apache-2.0
// What an executor refuses and how it ends: all that touches no device.
#include "backend/cuda/nccl_executor.h"

#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "backend/cuda/nccl_api_mock.h"
#include "tests/support/thrown_messages.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::messageThrownBy;
using testing::MockNcclApi;
using ::testing::StrictMock;

const at::Device kDevice(at::kCUDA, 0);
const GroupIdentity kGroup{"trainers", 1, 4};

class NcclExecutorTest : public ::testing::Test {
 protected:
  static Operation operation(int peer = -1) {
    return {.name = "bagua:some", .peer = peer, .timeout = std::chrono::minutes(1)};
  }
  std::string submitMessage() {
    return messageThrownBy([this] { executor_.submit(operation(), {}, [](Communicator&) {}); });
  }

  NcclExecutor::Options withChannels(int channels) {
    return {.api = api_,
            .store = c10::make_intrusive<c10d::HashStore>(),
            .device = kDevice,
            .topology = std::make_shared<const HostTopology>(HostTopology::oneRankPerHost(4)),
            .timeout = std::chrono::minutes(1),
            .isHighPriority = false,
            .channels = channels};
  }

  // No NCCL call is made by any of this.
  StrictMock<MockNcclApi> api_;
  NcclExecutor executor_{kGroup, withChannels(1)};
};

TEST_F(NcclExecutorTest, EndsAlsoWithTwoChannels) {
  NcclExecutor executor(kGroup, withChannels(2));
  executor.abort("the user has enough");
  EXPECT_TRUE(executor.error());
  executor.shutdown();
  EXPECT_THAT(messageThrownBy([&] { executor.submit(operation(), {}, [](Communicator&) {}); }),
              HasSubstr("has been shut down"));
}

TEST_F(NcclExecutorTest, HasOneChannelOrTwo) {
  for (const int channels : {0, 3}) {
    EXPECT_THAT(messageThrownBy([&] { NcclExecutor(kGroup, withChannels(channels)); }),
                HasSubstr("expected one channel or 2, got " + std::to_string(channels)));
  }
}

TEST_F(NcclExecutorTest, ReceiveFromAnySourceIsRefusedByName) {
  EXPECT_THAT(messageThrownBy([&] { executor_.receive(operation(MessageExecutor::kAnySource), at::ones({1}), 0); }),
              AllOf(HasSubstr("bagua:some on rank 1, group 'trainers'"), HasSubstr("cannot receive from any source")));
}

TEST_F(NcclExecutorTest, PeersOutsideTheGroupAreRefused) {
  EXPECT_THROW(executor_.send(operation(4), at::ones({1}), 0), c10::ValueError);
  EXPECT_THAT(messageThrownBy([&] { executor_.receive(operation(7), at::ones({1}), 0); }),
              HasSubstr("there is no rank 7 in group 'trainers' of 4"));
}

TEST_F(NcclExecutorTest, MessageToOneselfNeedsAGroup) {
  EXPECT_THAT(messageThrownBy([&] { executor_.send(operation(1), at::ones({1}), 0); }),
              HasSubstr("a message to oneself needs a group"));
}

TEST_F(NcclExecutorTest, AbortFailsLaterCallsWithItsReason) {
  EXPECT_FALSE(executor_.error());
  executor_.abort("the trainer gave up");
  EXPECT_EQ(messageOf(executor_.error()), "the trainer gave up");
  const std::string expected = "group 'trainers' is unusable since an earlier failure: the trainer gave up";
  EXPECT_THAT(submitMessage(), HasSubstr(expected));
  EXPECT_THAT(messageThrownBy([&] { executor_.send(operation(2), at::ones({1}), 0); }), HasSubstr(expected));
  EXPECT_EQ(executor_.submitted(), 0);
}

TEST_F(NcclExecutorTest, ShutdownIsFinalAndCanBeRepeated) {
  executor_.shutdown();
  executor_.shutdown();
  EXPECT_FALSE(executor_.error());
  EXPECT_THAT(submitMessage(), HasSubstr("group 'trainers' has been shut down"));
}

TEST_F(NcclExecutorTest, GroupsAreEndedOnlyOnceStarted) {
  EXPECT_THAT(messageThrownBy([&] { executor_.endGroup(); }), HasSubstr("without a start"));
}

TEST_F(NcclExecutorTest, AGroupThatWasNeverEndedIsDroppedByTheNext) {
  executor_.startGroup();
  EXPECT_NO_THROW(executor_.startGroup());
}

TEST_F(NcclExecutorTest, GroupThatCannotBeRunThrows) {
  executor_.startGroup();
  executor_.abort("the trainer gave up");
  EXPECT_THAT(messageThrownBy([&] { executor_.endGroup(); }), HasSubstr("the trainer gave up"));
  executor_.startGroup();
}

TEST(StreamExecutorTest, NeedsACudaDeviceWithAnIndex) {
  EXPECT_THAT(messageThrownBy([] { makeStreamExecutor(kGroup, nullptr, at::kCPU); }), HasSubstr("got cpu"));
  EXPECT_THAT(messageThrownBy([] { makeStreamExecutor(kGroup, nullptr, at::kCUDA); }), HasSubstr("got cuda"));
}

class WorkCudaTest : public ::testing::Test {
 protected:
  WorkCuda work_{kGroup, {.name = "bagua:all_reduce", .timeout = std::chrono::minutes(1)}, kDevice, {}};
};

TEST_F(WorkCudaTest, IsPendingUntilItIsEnqueued) {
  EXPECT_FALSE(work_.isCompleted());
  EXPECT_THAT(messageThrownBy([&] { work_.wait(kNoTimeout); }), HasSubstr("coalescing that this operation belongs to"));
}

TEST_F(WorkCudaTest, FirstFailureIsTheOneThatIsThrown) {
  work_.fail(std::make_exception_ptr(std::runtime_error("first")));
  work_.fail(std::make_exception_ptr(std::runtime_error("second")));
  EXPECT_TRUE(work_.isCompleted());
  EXPECT_FALSE(work_.isSuccess());
  EXPECT_EQ(messageThrownBy([&] { work_.wait(kNoTimeout); }), "first");
  EXPECT_EQ(messageThrownBy([&] { work_.wait(milliseconds(10)); }), "first");
  EXPECT_EQ(messageThrownBy([&] { work_.synchronize(); }), "first");
}

TEST_F(WorkCudaTest, FailureReachesTheFuture) {
  work_.fail(std::make_exception_ptr(std::runtime_error("lost")));
  work_.publish();
  const auto future = work_.getFuture();
  ASSERT_TRUE(future && future->hasError());
  EXPECT_EQ(future->tryRetrieveErrorMessage(), "lost");
}

}  // namespace
}  // namespace bagua
