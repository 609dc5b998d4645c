// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/nccl_handle.h"

#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "backend/cuda/nccl_api_mock.h"
#include "tests/support/thrown_messages.h"

namespace bagua {
namespace {

using ::testing::_;
using ::testing::DoAll;
using ::testing::HasSubstr;
using ::testing::InSequence;
using testing::messageThrownBy;
using testing::MockNcclApi;
using ::testing::NiceMock;
using ::testing::Return;
using ::testing::SetArgPointee;

auto soon() { return std::chrono::steady_clock::now() + std::chrono::milliseconds(50); }
auto muchLater() { return std::chrono::steady_clock::now() + std::chrono::minutes(1); }

// The state that commGetAsyncError reports.
auto state(ncclResult_t result) { return DoAll(SetArgPointee<1>(result), Return(ncclSuccess)); }

class NcclHandleTest : public ::testing::Test {
 protected:
  void open() { handle_->init(2, 0, ncclUniqueId{}, muchLater()); }
  void callReturning(ncclResult_t result, NcclHandle::Deadline deadline) {
    handle_->call("ncclBroadcast", deadline, [&](ncclComm_t) { return result; });
  }

  NiceMock<MockNcclApi> api_;
  std::unique_ptr<NcclHandle> handle_ = std::make_unique<NcclHandle>(api_);
};

TEST_F(NcclHandleTest, AsksForANonBlockingCommunicator) {
  EXPECT_CALL(api_, commInitRankConfig(_, 2, _, 0, _))
      .WillOnce([](ncclComm_t* comm, int, const ncclUniqueId&, int, ncclConfig_t* config) {
        *comm = MockNcclApi::kComm;
        EXPECT_EQ(config->blocking, 0);
        return ncclInProgress;
      });
  EXPECT_CALL(api_, commGetAsyncError(MockNcclApi::kComm, _))
      .WillOnce(state(ncclInProgress))
      .WillOnce(state(ncclSuccess));
  open();
  EXPECT_TRUE(handle_->isOpen());
}

TEST_F(NcclHandleTest, OnlyWhatIsAskedForHasALimitOfCtas) {
  int limit = 0;
  ON_CALL(api_, commInitRankConfig).WillByDefault([&](ncclComm_t* comm, auto, auto, auto, ncclConfig_t* config) {
    *comm = MockNcclApi::kComm;
    limit = config->maxCTAs;
    return ncclSuccess;
  });
  open();
  EXPECT_EQ(limit, NCCL_CONFIG_UNDEF_INT);
  NcclHandle limited(api_);
  limited.init(2, 0, ncclUniqueId{}, muchLater(), 2);
  EXPECT_EQ(limit, 2);
  EXPECT_CALL(api_, commSplit).WillOnce([](auto, auto, auto, ncclComm_t* comm, const ncclConfig_t* config) {
    EXPECT_EQ(config->blocking, 0);
    EXPECT_EQ(config->maxCTAs, NCCL_CONFIG_UNDEF_INT);
    *comm = MockNcclApi::kSplitComm;
    return ncclSuccess;
  });
  NcclHandle part(api_);
  part.split(limited, 0, 0, muchLater());
}

TEST_F(NcclHandleTest, OnlyWhatIsAskedForTakesANetworkByItsName) {
  const char* net = "any";
  ON_CALL(api_, commInitRankConfig).WillByDefault([&](ncclComm_t* comm, auto, auto, auto, ncclConfig_t* config) {
    *comm = MockNcclApi::kComm;
    net = config->netName;
    return ncclSuccess;
  });
  open();
  EXPECT_EQ(net, nullptr);
  NcclHandle named(api_);
  named.init(2, 0, ncclUniqueId{}, muchLater(), 2, "bagua");
  EXPECT_STREQ(net, "bagua");
}

TEST_F(NcclHandleTest, CallReturnsWhenNcclHasFinishedEnqueueing) {
  open();
  EXPECT_CALL(api_, commGetAsyncError(MockNcclApi::kComm, _))
      .WillOnce(state(ncclInProgress))
      .WillOnce(state(ncclInProgress))
      .WillOnce(state(ncclSuccess));
  callReturning(ncclInProgress, muchLater());
}

TEST_F(NcclHandleTest, CallThatNeverFinishesThrowsAtItsDeadline) {
  open();
  ON_CALL(api_, commGetAsyncError).WillByDefault(state(ncclInProgress));
  EXPECT_THAT(messageThrownBy([&] { callReturning(ncclInProgress, soon()); }),
              HasSubstr("ncclBroadcast has not returned within its time limit"));
}

TEST_F(NcclHandleTest, ErrorsNameTheCallAndSayWhatNcclSays) {
  open();
  EXPECT_THAT(messageThrownBy([&] { callReturning(ncclInvalidUsage, muchLater()); }),
              HasSubstr("ncclBroadcast: nccl says " + std::to_string(ncclInvalidUsage)));
  ON_CALL(api_, commGetAsyncError).WillByDefault(state(ncclRemoteError));
  EXPECT_THAT(messageThrownBy([&] { callReturning(ncclInProgress, muchLater()); }),
              HasSubstr("ncclBroadcast: nccl says " + std::to_string(ncclRemoteError)));
}

TEST_F(NcclHandleTest, AbortEndsACallInAnotherThread) {
  open();
  ON_CALL(api_, commGetAsyncError).WillByDefault(state(ncclInProgress));
  EXPECT_CALL(api_, commAbort(MockNcclApi::kComm)).Times(1);
  std::string message;
  std::thread caller([&] { message = messageThrownBy([&] { callReturning(ncclInProgress, muchLater()); }); });
  handle_->abort();
  caller.join();
  EXPECT_THAT(message, HasSubstr("the NCCL communicator has been aborted"));
}

TEST_F(NcclHandleTest, SplitWaitsForTheParentAndThenForTheNewCommunicator) {
  open();
  ncclComm_t* made = nullptr;
  const InSequence order;
  EXPECT_CALL(api_, commSplit(MockNcclApi::kComm, 3, 1, _, _)).WillOnce([&](auto, auto, auto, ncclComm_t* comm, auto) {
    made = comm;
    return ncclSuccess;  // it has only begun
  });
  EXPECT_CALL(api_, commGetAsyncError(MockNcclApi::kComm, _)).WillOnce(state(ncclInProgress));
  EXPECT_CALL(api_, commGetAsyncError(MockNcclApi::kComm, _)).WillOnce([&](ncclComm_t, ncclResult_t* result) {
    *made = MockNcclApi::kSplitComm;
    *result = ncclSuccess;
    return ncclSuccess;
  });
  EXPECT_CALL(api_, commGetAsyncError(MockNcclApi::kSplitComm, _)).WillOnce(state(ncclInProgress));
  EXPECT_CALL(api_, commGetAsyncError(MockNcclApi::kSplitComm, _)).WillOnce(state(ncclSuccess));
  EXPECT_CALL(api_, commAbort(MockNcclApi::kSplitComm));
  EXPECT_CALL(api_, commAbort(MockNcclApi::kComm));
  NcclHandle part(api_);
  part.split(*handle_, 3, 1, muchLater());
  EXPECT_TRUE(part.isOpen());
}

TEST_F(NcclHandleTest, SplitThatNeverFinishesThrowsAtItsDeadline) {
  open();
  ON_CALL(api_, commSplit).WillByDefault(Return(ncclInProgress));
  ON_CALL(api_, commGetAsyncError).WillByDefault(state(ncclInProgress));
  NcclHandle part(api_);
  EXPECT_THAT(messageThrownBy([&] { part.split(*handle_, 0, 0, soon()); }),
              HasSubstr("ncclCommSplit has not returned within its time limit"));
  EXPECT_FALSE(part.isOpen());
}

TEST_F(NcclHandleTest, WhatASplitMadeForAnAbortedHandleIsAborted) {
  open();
  NcclHandle part(api_);
  part.abort();
  EXPECT_CALL(api_, commAbort(MockNcclApi::kSplitComm)).Times(1);
  EXPECT_THAT(messageThrownBy([&] { part.split(*handle_, 0, 0, muchLater()); }),
              HasSubstr("ncclCommSplit: the NCCL communicator has been aborted"));
  EXPECT_CALL(api_, commAbort(MockNcclApi::kComm)).Times(1);
}

// ncclCommAbort of a communicator returns when the last graph with its calls is gone.
class EndlessAbort {
 public:
  explicit EndlessAbort(MockNcclApi& api) {
    ON_CALL(api, commAbort).WillByDefault([this](ncclComm_t) {
      begun_.set_value();
      graphs_.get_future().wait();
      ended_.set_value_at_thread_exit();  // when nothing of the mock is in use any more
      return ncclSuccess;
    });
  }
  ~EndlessAbort() {
    graphs_.set_value();
    ended_.get_future().wait();
  }
  EndlessAbort(const EndlessAbort&) = delete;
  EndlessAbort& operator=(const EndlessAbort&) = delete;
  void awaitBegin() { begun_.get_future().wait(); }

 private:
  std::promise<void> begun_;
  std::promise<void> graphs_;
  std::promise<void> ended_;
};

TEST_F(NcclHandleTest, AbortDoesNotWaitForGraphs) {
  open();
  handle_->enterGraph();
  EndlessAbort endless(api_);
  handle_->abort();
  EXPECT_TRUE(handle_->isAborted());
  endless.awaitBegin();
  handle_.reset();
}

TEST_F(NcclHandleTest, CloseOfACommunicatorInAGraphEndsAtItsDeadline) {
  open();
  handle_->enterGraph();
  EndlessAbort endless(api_);
  ON_CALL(api_, commFinalize).WillByDefault(Return(ncclInProgress));
  ON_CALL(api_, commGetAsyncError).WillByDefault(state(ncclInProgress));
  handle_->close(soon());
  EXPECT_TRUE(handle_->isAborted());
  endless.awaitBegin();
}

TEST_F(NcclHandleTest, NobodyWaitsForAnAbortOfAnotherThread) {
  open();
  std::thread aborting;
  {
    EndlessAbort endless(api_);
    aborting = std::thread([this] { handle_->abort(); });
    endless.awaitBegin();
    EXPECT_TRUE(handle_->isAborted());
    EXPECT_FALSE(handle_->isOpen());
    EXPECT_EQ(handle_->asyncError(), "");
  }
  aborting.join();
}

TEST_F(NcclHandleTest, AbortedHandleRefusesCallsAndInit) {
  handle_->abort();
  EXPECT_CALL(api_, commInitRankConfig).Times(0);
  EXPECT_THAT(messageThrownBy([&] { open(); }), HasSubstr("has been aborted"));
  EXPECT_THAT(messageThrownBy([&] { callReturning(ncclSuccess, muchLater()); }), HasSubstr("has been aborted"));
}

TEST_F(NcclHandleTest, CloseFinalizesAndThenDestroys) {
  open();
  {
    const InSequence order;
    EXPECT_CALL(api_, commFinalize(MockNcclApi::kComm)).WillOnce(Return(ncclInProgress));
    EXPECT_CALL(api_, commGetAsyncError).WillOnce(state(ncclInProgress)).WillOnce(state(ncclSuccess));
    EXPECT_CALL(api_, commDestroy(MockNcclApi::kComm)).WillOnce(Return(ncclSuccess));
  }
  EXPECT_CALL(api_, commAbort).Times(0);
  handle_->close(muchLater());
  EXPECT_FALSE(handle_->isOpen());
  handle_.reset();
}

TEST_F(NcclHandleTest, CloseAbortsWhereThePeersDoNotFollow) {
  open();
  ON_CALL(api_, commGetAsyncError).WillByDefault(state(ncclInProgress));
  EXPECT_CALL(api_, commFinalize).WillOnce(Return(ncclInProgress));
  EXPECT_CALL(api_, commDestroy).Times(0);
  EXPECT_CALL(api_, commAbort(MockNcclApi::kComm)).Times(1);
  handle_->close(soon());
  EXPECT_TRUE(handle_->isAborted());
}

TEST_F(NcclHandleTest, DestructorAbortsWhatWasNotClosed) {
  open();
  EXPECT_CALL(api_, commFinalize).Times(0);
  EXPECT_CALL(api_, commAbort(MockNcclApi::kComm)).Times(1);
  handle_.reset();
}

TEST_F(NcclHandleTest, AsyncErrorDoesNotWaitForACall) {
  open();
  handle_->call("ncclAllReduce", muchLater(), [this](ncclComm_t) {
    EXPECT_EQ(std::async(std::launch::async, [this] { return handle_->asyncError(); }).get(), "");
    return ncclSuccess;
  });
}

TEST_F(NcclHandleTest, AsyncErrorIsEmptyWhileAllIsWell) {
  EXPECT_EQ(handle_->asyncError(), "");
  open();
  EXPECT_EQ(handle_->asyncError(), "");
  ON_CALL(api_, commGetAsyncError).WillByDefault(state(ncclInProgress));
  EXPECT_EQ(handle_->asyncError(), "");
  ON_CALL(api_, commGetAsyncError).WillByDefault(state(ncclRemoteError));
  EXPECT_EQ(handle_->asyncError(), "nccl says " + std::to_string(ncclRemoteError));
}

TEST_F(NcclHandleTest, AStateThatNcclCannotTellIsAnError) {
  open();
  ON_CALL(api_, commGetAsyncError).WillByDefault(Return(ncclInternalError));
  const std::string text = "nccl says " + std::to_string(ncclInternalError);
  EXPECT_EQ(handle_->asyncError(), text);
  EXPECT_THAT(messageThrownBy([&] { callReturning(ncclInProgress, muchLater()); }), HasSubstr(text));
}

}  // namespace
}  // namespace bagua
