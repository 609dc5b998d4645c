// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/nccl_bootstrap.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "backend/cuda/nccl_api_mock.h"
#include "tests/support/thrown_messages.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;
using ::testing::_;
using ::testing::AllOf;
using ::testing::DoAll;
using ::testing::HasSubstr;
using testing::messageThrownBy;
using testing::MockNcclApi;
using ::testing::NiceMock;
using ::testing::Not;
using ::testing::Return;
using ::testing::SetArgPointee;

constexpr milliseconds kShort{200};
constexpr milliseconds kLong{60000};

class NcclBootstrapTest : public ::testing::Test {
 protected:
  // What rank `rank` of `size` gets to know; empty when it connected.
  std::string connect(int rank, int size, milliseconds timeout, bool spansHosts = false) {
    NcclMembers members{.groupName = "trainers", .ranks = {}, .self = rank, .spansHosts = spansHosts};
    for (int r = 0; r < size; ++r) members.ranks.push_back(r);
    NcclBootstrap bootstrap(apis_.at(rank), store_, "all", members);
    return messageThrownBy([&] { bootstrap.connect(handles_.at(rank), timeout); });
  }
  void neverFinishInit(int rank) {
    ON_CALL(apis_.at(rank), commInitRankConfig)
        .WillByDefault(DoAll(SetArgPointee<0>(MockNcclApi::kComm), Return(ncclInProgress)));
    ON_CALL(apis_.at(rank), commGetAsyncError)
        .WillByDefault(DoAll(SetArgPointee<1>(ncclInProgress), Return(ncclSuccess)));
  }

  c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
  std::array<NiceMock<MockNcclApi>, 3> apis_;
  std::array<NcclHandle, 3> handles_{NcclHandle(apis_[0]), NcclHandle(apis_[1]), NcclHandle(apis_[2])};
};

TEST_F(NcclBootstrapTest, AllRanksInitialiseWithTheIdOfTheFirst) {
  EXPECT_CALL(apis_[0], getUniqueId).WillOnce([](ncclUniqueId* id) {
    std::strcpy(id->internal, "the id");
    return ncclSuccess;
  });
  EXPECT_CALL(apis_[1], getUniqueId).Times(0);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_CALL(apis_[rank], commInitRankConfig(_, 3, _, rank, _))
        .WillOnce([](ncclComm_t* comm, int, const ncclUniqueId& id, int, ncclConfig_t*) {
          EXPECT_STREQ(id.internal, "the id");
          *comm = MockNcclApi::kComm;
          return ncclSuccess;
        });
  }
  std::array<std::string, 3> messages;
  std::vector<std::thread> ranks;
  for (int rank = 2; rank >= 0; --rank) ranks.emplace_back([&, rank] { messages[rank] = connect(rank, 3, kLong); });
  for (auto& thread : ranks) thread.join();
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(messages[rank], "");
    EXPECT_TRUE(handles_[rank].isOpen());
  }
}

TEST_F(NcclBootstrapTest, MissingFirstRankIsNamed) {
  EXPECT_CALL(apis_[1], commInitRankConfig).Times(0);
  EXPECT_THAT(connect(1, 2, kShort),
              AllOf(HasSubstr("group 'trainers': rank 1 could not connect"), HasSubstr("NCCL's id did not come"),
                    HasSubstr("Never got here: rank 0. Check that these processes are alive")));
  EXPECT_TRUE(handles_[1].isAborted());
}

TEST_F(NcclBootstrapTest, RankThatIsMissingInInitIsNamedAndTheCommunicatorAborted) {
  neverFinishInit(0);
  EXPECT_CALL(apis_[0], commAbort(MockNcclApi::kComm)).Times(1);
  EXPECT_THAT(connect(0, 3, kShort),
              AllOf(HasSubstr("ncclCommInitRankConfig has not returned"), HasSubstr("Never got here: rank 1, 2.")));
}

TEST_F(NcclBootstrapTest, WhenEverybodyHasComeTheNetworkIsToBeChecked) {
  neverFinishInit(0);
  neverFinishInit(1);
  std::string second;
  std::thread thread([&] { second = connect(1, 2, kShort); });
  const std::string first = connect(0, 2, kShort);
  thread.join();
  // The second may have come when the first had given up, so only one of them is sure to have seen both.
  EXPECT_THAT(first + second, HasSubstr("NCCL_SOCKET_IFNAME"));
}

TEST_F(NcclBootstrapTest, ErrorOfInitIsReportedWithNcclsText) {
  EXPECT_CALL(apis_[0], commInitRankConfig)
      .WillOnce(DoAll(SetArgPointee<0>(MockNcclApi::kComm), Return(ncclSystemError)));
  EXPECT_CALL(apis_[0], commAbort(MockNcclApi::kComm)).Times(1);
  EXPECT_THAT(connect(0, 1, kLong), HasSubstr("ncclCommInitRankConfig: nccl says " + std::to_string(ncclSystemError)));
}

TEST_F(NcclBootstrapTest, FailureToMakeAnIdReachesTheOtherRanks) {
  EXPECT_CALL(apis_[0], getUniqueId).WillOnce(Return(ncclInternalError));
  const std::string text = "ncclGetUniqueId: nccl says " + std::to_string(ncclInternalError);
  EXPECT_THAT(connect(0, 2, kLong), HasSubstr(text));
  EXPECT_THAT(connect(1, 2, kLong), HasSubstr("rank 0 has no NCCL id: " + text));
}

TEST_F(NcclBootstrapTest, AbortEndsTheWaitForTheId) {
  std::string message;
  std::thread waiting([&] { message = connect(1, 2, kLong); });
  handles_[1].abort();
  waiting.join();
  EXPECT_THAT(message, HasSubstr("aborted while waiting for NCCL's id"));
}

// Some threads are far from it.
class FarStore final : public c10d::HashStore {
 public:
  static inline thread_local bool isFar = false;
  bool check(const std::vector<std::string>& keys) override {
    if (isFar) std::this_thread::sleep_for(milliseconds(20));
    return HashStore::check(keys);
  }
};

class NcclTermsTest : public NcclBootstrapTest {
 protected:
  NcclTermsTest() {
    store_ = c10::make_intrusive<FarStore>();
    setenv("NCCL_CONF_FILE", "/nowhere", 1);
    setenv("NCCL_NET", "Socket", 1);
    for (int rank = 0; rank < 3; ++rank) {
      ON_CALL(apis_[rank], commInitRankConfig)
          .WillByDefault([this, rank](ncclComm_t* comm, auto, auto, auto, const ncclConfig_t* config) {
            *comm = MockNcclApi::kComm;
            maxCtas_.at(rank) = config->maxCTAs;
            return ncclSuccess;
          });
    }
  }
  ~NcclTermsTest() override {
    for (const char* name : {"NCCL_CONF_FILE", "NCCL_NET", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"}) {
      unsetenv(name);
    }
  }
  void connectAll(bool spansHosts) {
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 3; ++rank) {
      ranks.emplace_back([this, rank, spansHosts] {
        FarStore::isFar = rank == 2;
        EXPECT_EQ(connect(rank, 3, kLong, spansHosts), "");
      });
    }
    for (auto& thread : ranks) thread.join();
  }

  std::array<int, 3> maxCtas_{};
};

TEST_F(NcclTermsTest, BetweenHostsAreThoseOfTheLongestRoundTripOnAllRanks) {
  connectAll(/*spansHosts=*/true);
  EXPECT_EQ(maxCtas_, (std::array{2, 2, 2}));
  EXPECT_EQ(ncclSetting("NCCL_SOCKET_NTHREADS"), "1");
  EXPECT_GE(std::stoi(ncclSetting("NCCL_NSOCKS_PERTHREAD").value_or("0")), 6);
}

TEST_F(NcclTermsTest, InsideAHostThereAreNone) {
  connectAll(/*spansHosts=*/false);
  EXPECT_EQ(maxCtas_, (std::array{NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT}));
  EXPECT_EQ(ncclSetting("NCCL_SOCKET_NTHREADS"), std::nullopt);
}

TEST_F(NcclTermsTest, ARankThatIsMissingIsNamedByTheFirst) {
  EXPECT_THAT(connect(0, 2, kShort, /*spansHosts=*/true),
              AllOf(HasSubstr("the other ranks did not come"), HasSubstr("Never got here: rank 1.")));
}

class BrokenStore final : public c10d::HashStore {
 public:
  void wait(const std::vector<std::string>&, const milliseconds&) override {
    C10_THROW_ERROR(DistStoreError, "connection reset");
  }
  bool check(const std::vector<std::string>&) override { C10_THROW_ERROR(DistStoreError, "connection reset"); }
};

TEST_F(NcclBootstrapTest, BrokenStoreIsNotTakenForAMissingRank) {
  store_ = c10::make_intrusive<BrokenStore>();
  EXPECT_THAT(connect(1, 2, kLong), AllOf(HasSubstr("connection reset"), HasSubstr("The store does not answer either"),
                                          Not(HasSubstr("Never got here"))));
}

}  // namespace
}  // namespace bagua
