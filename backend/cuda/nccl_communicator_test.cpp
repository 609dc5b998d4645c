// SPDX-License-Identifier: Apache-2.0
// On CPU tensors: what is handed to NCCL, not what NCCL does with it.
#include "backend/cuda/nccl_communicator.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cstring>
#include <vector>

#include "backend/cuda/nccl_api_mock.h"
#include "tests/support/thrown_messages.h"

namespace bagua {
namespace {

using c10d::ReduceOp;
using ::testing::_;
using ::testing::DoAll;
using ::testing::HasSubstr;
using ::testing::InSequence;
using testing::messageThrownBy;
using testing::MockNcclApi;
using ::testing::NiceMock;
using testing::preMulSum;
using ::testing::Return;
using ::testing::SetArgPointee;

constexpr int kRank = 1;
constexpr int kSize = 4;
const ncclComm_t kComm = MockNcclApi::kComm;
// Never looked into.
const auto kStream = reinterpret_cast<cudaStream_t>(uintptr_t{0x20});

class NcclCommunicatorTest : public ::testing::Test {
 protected:
  NcclCommunicatorTest() { communicator_.setDeadline(std::chrono::steady_clock::now() + std::chrono::minutes(1)); }

  NiceMock<MockNcclApi> api_;
  int connections_ = 0;
  std::function<void(NcclHandle&)> connect_ = [](NcclHandle& handle) {
    handle.init(kSize, kRank, ncclUniqueId{}, std::chrono::steady_clock::now() + std::chrono::minutes(1));
  };
  NcclCommunicator::Environment environment_{
      .api = api_,
      .device = at::kCPU,
      .connect =
          [this](NcclHandle& handle) {
            ++connections_;
            connect_(handle);
          },
      .currentStream = [] { return kStream; },
      .timeout = std::chrono::minutes(1),
      .prepareThread = [] {},
  };
  NcclCommunicator communicator_{
      kRank, kSize, std::make_shared<const HostTopology>(HostTopology::oneRankPerHost(kSize)), environment_};
};

TEST_F(NcclCommunicatorTest, ConnectsOnceWithTheFirstCall) {
  at::Tensor tensor = at::ones({3});
  EXPECT_EQ(connections_, 0);
  communicator_.allReduce(tensor, ReduceOp::SUM);
  communicator_.allReduce(tensor, ReduceOp::SUM);
  EXPECT_EQ(connections_, 1);
}

TEST_F(NcclCommunicatorTest, MovesBytesOfAnyDtype) {
  at::Tensor shorts = at::ones({3}, at::kShort);
  EXPECT_CALL(api_, broadcast(shorts.data_ptr(), shorts.data_ptr(), 6, ncclUint8, 2, kComm, kStream));
  communicator_.broadcast(shorts, 2);
  at::Tensor gathered = at::ones({12}, at::kShort);
  EXPECT_CALL(api_, allGather(shorts.data_ptr(), gathered.data_ptr(), 6, ncclUint8, kComm, kStream));
  communicator_.allGather(gathered, shorts);
}

TEST_F(NcclCommunicatorTest, ReducesInPlace) {
  at::Tensor tensor = at::ones({5}, at::kHalf);
  void* data = tensor.data_ptr();
  EXPECT_CALL(api_, allReduce(data, data, 5, ncclFloat16, ncclAvg, kComm, kStream));
  communicator_.allReduce(tensor, ReduceOp::AVG);
  EXPECT_CALL(api_, reduce(data, data, 5, ncclFloat16, ncclMax, 3, kComm, kStream));
  communicator_.reduce(tensor, 3, ReduceOp::MAX);
}

TEST_F(NcclCommunicatorTest, CountsComplexNumbersTwice) {
  at::Tensor output = at::ones({3}, at::kComplexFloat);
  const at::Tensor input = at::ones({12}, at::kComplexFloat);
  EXPECT_CALL(api_, reduceScatter(input.data_ptr(), output.data_ptr(), 6, ncclFloat32, ncclSum, kComm, kStream));
  communicator_.reduceScatter(output, input, ReduceOp::SUM);
}

TEST_F(NcclCommunicatorTest, AllToAllIsOneGroupWithoutTheEmptyParts) {
  const at::Tensor input = at::ones({6}, at::kInt);
  at::Tensor output = at::ones({4}, at::kInt);
  auto* const in = static_cast<int*>(input.data_ptr());
  auto* const out = static_cast<int*>(output.data_ptr());
  {
    const InSequence order;
    EXPECT_CALL(api_, groupStart());
    EXPECT_CALL(api_, send(in, 4, ncclUint8, 0, kComm, kStream));
    EXPECT_CALL(api_, send(in + 1, 8, ncclUint8, 1, kComm, kStream));
    EXPECT_CALL(api_, send(in + 3, 12, ncclUint8, 3, kComm, kStream));
    EXPECT_CALL(api_, receive(out, 8, ncclUint8, 1, kComm, kStream));
    EXPECT_CALL(api_, receive(out + 2, 8, ncclUint8, 2, kComm, kStream));
    EXPECT_CALL(api_, groupEnd());
  }
  communicator_.allToAll(output, input, {0, 2, 2, 0}, {1, 2, 0, 3});
  EXPECT_EQ(communicator_.traffic().sentBytes(), 4 + 12);
}

TEST_F(NcclCommunicatorTest, EvenAllToAllSendsEachRankItsPart) {
  const at::Tensor input = at::ones({8}, at::kByte);
  at::Tensor output = at::ones({8}, at::kByte);
  for (int peer = 0; peer < kSize; ++peer) {
    EXPECT_CALL(
        api_, send(static_cast<uint8_t*>(input.data_ptr()) + ptrdiff_t{2} * peer, 2, ncclUint8, peer, kComm, kStream));
    EXPECT_CALL(api_, receive(static_cast<uint8_t*>(output.data_ptr()) + ptrdiff_t{2} * peer, 2, ncclUint8, peer, kComm,
                              kStream));
  }
  communicator_.allToAll(output, input, {}, {});
}

// NCCL 2.28 never frees what it sets up for a group without calls.
TEST_F(NcclCommunicatorTest, NothingToSendOrReceiveIsNoGroup) {
  const at::Tensor input = at::ones({8}).narrow(0, 0, 0);
  at::Tensor output = at::ones({8}).narrow(0, 0, 0);
  EXPECT_CALL(api_, groupStart()).Times(0);
  communicator_.allToAll(output, input, {}, {});
}

TEST_F(NcclCommunicatorTest, GroupIsEndedAlsoAfterAFailedSend) {
  const at::Tensor input = at::ones({8});
  at::Tensor output = at::ones({8});
  EXPECT_CALL(api_, send).WillOnce(Return(ncclInvalidArgument));
  EXPECT_CALL(api_, receive).Times(0);
  EXPECT_CALL(api_, groupEnd()).Times(1);
  EXPECT_THAT(messageThrownBy([&] { communicator_.allToAll(output, input, {}, {}); }),
              HasSubstr("ncclSend/ncclRecv: nccl says " + std::to_string(ncclInvalidArgument)));
}

TEST_F(NcclCommunicatorTest, FactorOfPremulSumIsInTheDtypeOfTheTensor) {
  const auto made = static_cast<ncclRedOp_t>(ncclNumOps + 1);
  const auto makeOp = [&](ncclRedOp_t* op, void* factor, ncclDataType_t, ncclScalarResidence_t, ncclComm_t) {
    float value = 0;
    std::memcpy(&value, factor, sizeof(value));
    EXPECT_EQ(value, 0.25F);
    *op = made;
    return ncclSuccess;
  };
  EXPECT_CALL(api_, redOpCreatePreMulSum(_, _, ncclFloat32, ncclScalarHostImmediate, kComm))
      .Times(2)
      .WillRepeatedly(makeOp);
  EXPECT_CALL(api_, allReduce(_, _, 3, ncclFloat32, made, kComm, kStream)).Times(2);
  EXPECT_CALL(api_, redOpDestroy(made, kComm)).Times(2);
  at::Tensor tensor = at::ones({3});
  communicator_.allReduce(tensor, preMulSum(0.25));
  communicator_.allReduce(tensor, preMulSum(at::scalar_tensor(0.25, at::kDouble)));
}

TEST_F(NcclCommunicatorTest, FactorOfPremulSumIsOneOfAnyFloatingPointDtype) {
  std::vector<double> factors;
  at::ScalarType dtype{};
  ON_CALL(api_, redOpCreatePreMulSum).WillByDefault([&](auto, void* factor, auto, auto, auto) {
    factors.push_back(at::from_blob(factor, {1}, dtype).item<double>());
    return ncclSuccess;
  });
  for (const auto one : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
    dtype = one;
    at::Tensor tensor = at::ones({3}, dtype);
    communicator_.allReduce(tensor, preMulSum(0.375));
  }
  EXPECT_EQ(factors, std::vector<double>(4, 0.375));
}

TEST_F(NcclCommunicatorTest, OperationIsDestroyedAlsoAfterAFailedReduction) {
  EXPECT_CALL(api_, allReduce).WillOnce(Return(ncclInvalidUsage));
  EXPECT_CALL(api_, redOpDestroy).Times(1);
  at::Tensor tensor = at::ones({3});
  EXPECT_THAT(messageThrownBy([&] { communicator_.allReduce(tensor, preMulSum(2.0)); }),
              HasSubstr("ncclAllReduce: nccl says"));
}

TEST_F(NcclCommunicatorTest, MistakesReachNobody) {
  at::Tensor shorts = at::ones({3}, at::kShort);
  EXPECT_THROW(communicator_.allReduce(shorts, ReduceOp::SUM), c10::TypeError);
  EXPECT_THROW(communicator_.allReduce(shorts, ReduceOp::BOR), c10::Error);
  EXPECT_EQ(communicator_.calls(), 0);
  EXPECT_EQ(connections_, 0);
}

TEST_F(NcclCommunicatorTest, FailedConnectionCountsAsACall) {
  connect_ = [](NcclHandle& handle) {
    handle.abort();
    TORCH_CHECK(false, "rank 3 is missing");
  };
  at::Tensor tensor = at::ones({3});
  EXPECT_THAT(messageThrownBy([&] { communicator_.barrier(); }), HasSubstr("rank 3 is missing"));
  EXPECT_GT(communicator_.calls(), 0);
  EXPECT_THAT(messageThrownBy([&] { communicator_.broadcast(tensor, 0); }), HasSubstr("has been aborted"));
  EXPECT_EQ(connections_, 1);
}

TEST_F(NcclCommunicatorTest, CallsKeepToTheDeadlineOfTheProgram) {
  at::Tensor tensor = at::ones({3});
  communicator_.barrier();
  communicator_.setDeadline(std::chrono::steady_clock::now());
  ON_CALL(api_, broadcast).WillByDefault(Return(ncclInProgress));
  ON_CALL(api_, commGetAsyncError).WillByDefault(DoAll(SetArgPointee<1>(ncclInProgress), Return(ncclSuccess)));
  EXPECT_THAT(messageThrownBy([&] { communicator_.broadcast(tensor, 0); }),
              HasSubstr("ncclBroadcast has not returned within its time limit"));
}

TEST_F(NcclCommunicatorTest, EmptyTensorsNeedNoCall) {
  at::Tensor empty = at::ones({0});
  communicator_.broadcast(empty, 0);
  communicator_.allReduce(empty, ReduceOp::SUM);
  communicator_.allGather(empty, empty);
  EXPECT_EQ(communicator_.calls(), 0);
}

TEST_F(NcclCommunicatorTest, CountsTheBytesThatLeaveThisRank) {
  at::Tensor tensor = at::ones({8});
  communicator_.allReduce(tensor, ReduceOp::SUM);
  EXPECT_EQ(communicator_.traffic().sentBytes(), 2 * 32 * 3 / 4);
  communicator_.broadcast(tensor, 0);
  EXPECT_EQ(communicator_.traffic().sentBytes(), 48);
  communicator_.broadcast(tensor, kRank);
  EXPECT_EQ(communicator_.traffic().sentBytes(), 48 + 96);
}

TEST_F(NcclCommunicatorTest, ABarrierReducesOneByteThatCountsAsNoTraffic) {
  EXPECT_CALL(api_, allReduce(_, _, 1, ncclUint8, ncclMax, kComm, kStream))
      .WillOnce([](const void* input, void* output, auto...) {
        EXPECT_EQ(input, output);
        EXPECT_EQ(*static_cast<const uint8_t*>(input), 0);
        return ncclSuccess;
      });
  communicator_.barrier();
  EXPECT_EQ(communicator_.traffic().sentBytes(), 0);
}

// Ranks 0 and 2 are on one host, 1 and 3 on another.
class InHostTest : public NcclCommunicatorTest {
 protected:
  InHostTest() { onHosts_.setDeadline(std::chrono::steady_clock::now() + std::chrono::minutes(1)); }
  void exchange() { onHosts_.allGatherInHost(flat_, {2, 2}); }

  static inline const ncclComm_t kHost = MockNcclApi::kSplitComm;
  at::Tensor flat_ = at::ones({4});
  float* const data_ = static_cast<float*>(flat_.data_ptr());
  NcclCommunicator onHosts_{
      kRank, kSize, std::make_shared<const HostTopology>(std::vector<std::string>{"a", "b", "a", "b"}), environment_};
};

TEST_F(InHostTest, EqualPartsAreReducedAndGatheredInPlaceByOneCallEach) {
  EXPECT_CALL(api_, commSplit(kComm, 1, 0, _, _)).Times(1);
  EXPECT_CALL(api_, reduceScatter(data_, data_, 2, ncclFloat32, ncclSum, kHost, kStream));
  EXPECT_CALL(api_, allGather(data_, data_, 8, ncclUint8, kHost, kStream));
  onHosts_.reduceScatterInHost(flat_, {2, 2}, 4);
  EXPECT_TRUE(at::equal(flat_, at::tensor({0.25F, 0.25F, 1.0F, 1.0F})));
  onHosts_.allGatherInHost(flat_, {2, 2});
  EXPECT_EQ(onHosts_.traffic().inHostBytes, 2 * 8);
  EXPECT_EQ(onHosts_.traffic().betweenHostsBytes, 0);
}

TEST_F(InHostTest, PartsThatDifferAreOneGroupWithoutTheEmptyOnes) {
  {
    const InSequence order;
    EXPECT_CALL(api_, groupStart());
    EXPECT_CALL(api_, reduce(data_, data_, 1, ncclFloat32, ncclSum, 0, kHost, kStream));
    EXPECT_CALL(api_, reduce(data_ + 1, data_ + 1, 3, ncclFloat32, ncclSum, 1, kHost, kStream));
    EXPECT_CALL(api_, groupEnd());
    EXPECT_CALL(api_, groupStart());
    EXPECT_CALL(api_, broadcast(data_, data_, 4, ncclUint8, 0, kHost, kStream));
    EXPECT_CALL(api_, broadcast(data_ + 1, data_ + 1, 12, ncclUint8, 1, kHost, kStream));
    EXPECT_CALL(api_, groupEnd());
    EXPECT_CALL(api_, groupStart());
    EXPECT_CALL(api_, reduce(data_, data_, 4, ncclFloat32, ncclSum, 0, kHost, kStream));
    EXPECT_CALL(api_, groupEnd());
  }
  onHosts_.reduceScatterInHost(flat_, {1, 3}, 1);
  onHosts_.allGatherInHost(flat_, {1, 3});
  EXPECT_EQ(onHosts_.traffic().inHostBytes, 12 + 4);
  onHosts_.reduceScatterInHost(flat_, {4, 0}, 1);
}

// The sum of these is no number of 16 bits; the mean is one.
TEST_F(InHostTest, HalvesAreAddedUpInFloat32) {
  at::Tensor halves = at::full({4}, 2, at::kHalf);
  const auto addUp = [](const void* /*sent*/, void* received, size_t count, auto... /*others*/) {
    std::fill_n(static_cast<float*>(received), count, 120'000.0F);
    return ncclSuccess;
  };
  EXPECT_CALL(api_, reduceScatter(_, _, 2, ncclFloat32, ncclSum, kHost, kStream)).WillOnce(addUp);
  onHosts_.reduceScatterInHost(halves, {2, 2}, 4);
  EXPECT_TRUE(at::equal(halves, at::tensor({30'000.0F, 30'000.0F, 2.0F, 2.0F}).to(at::kHalf)));
}

TEST_F(InHostTest, IsMadeWithTheFirstCallOfAnyKind) {
  EXPECT_CALL(api_, commSplit).Times(1);
  at::Tensor tensor = at::ones({3});
  onHosts_.broadcast(tensor, 0);
  onHosts_.broadcast(tensor, 0);
}

TEST_F(InHostTest, IsNotMadeWhereNoRanksShareAHost) {
  EXPECT_CALL(api_, commSplit).Times(0);
  at::Tensor tensor = at::ones({3});
  communicator_.broadcast(tensor, 0);
  communicator_.reduceScatterInHost(tensor, {3}, 2);
  communicator_.allGatherInHost(tensor, {3});
  EXPECT_TRUE(at::equal(tensor, at::full({3}, 0.5F)));
  EXPECT_EQ(communicator_.calls(), 1);
}

TEST_F(InHostTest, ASplitThatFailsAbortsTheGroupAndCountsAsACall) {
  ON_CALL(api_, commSplit).WillByDefault(Return(ncclSystemError));
  EXPECT_CALL(api_, commAbort(kComm)).Times(1);
  at::Tensor tensor = at::ones({3});
  EXPECT_THAT(messageThrownBy([&] { onHosts_.broadcast(tensor, 0); }), HasSubstr("ncclCommSplit: nccl says"));
  EXPECT_GT(onHosts_.calls(), 0);
}

TEST_F(InHostTest, EndsWithTheGroupAndBeforeIt) {
  exchange();
  const InSequence order;
  EXPECT_CALL(api_, commDestroy(MockNcclApi::kSplitComm));
  EXPECT_CALL(api_, commDestroy(kComm));
  onHosts_.close(std::chrono::steady_clock::now() + std::chrono::minutes(1));
}

TEST_F(InHostTest, BothCommunicatorsAreAbortedAtTheSameTime) {
  exchange();
  std::barrier<> both(2);
  const auto wait = [&](ncclComm_t) {
    both.arrive_and_wait();
    return ncclSuccess;
  };
  EXPECT_CALL(api_, commAbort(kComm)).WillOnce(wait);
  EXPECT_CALL(api_, commAbort(MockNcclApi::kSplitComm)).WillOnce(wait);
  onHosts_.abort();
  EXPECT_THAT(messageThrownBy([&] { exchange(); }), HasSubstr("has been aborted"));
}

TEST_F(InHostTest, ItsErrorsAreTheGroups) {
  exchange();
  EXPECT_EQ(onHosts_.asyncError(), "");
  ON_CALL(api_, commGetAsyncError(MockNcclApi::kSplitComm, _))
      .WillByDefault(DoAll(SetArgPointee<1>(ncclRemoteError), Return(ncclSuccess)));
  EXPECT_THAT(onHosts_.asyncError(), HasSubstr("nccl says"));
}

}  // namespace
}  // namespace bagua
