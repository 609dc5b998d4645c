// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gmock/gmock.h>

#include <cstdint>
#include <string>
#include <utility>

#include "backend/cuda/nccl_api.h"
#include "backend/torch_compat.h"

namespace bagua::testing {

// Says how our code calls NCCL; proves nothing about NCCL. By default every call succeeds init hands out kComm and
// split kSplitComm.
class MockNcclApi : public NcclApi {
 public:
  // Not inline: each would make every source that includes this instantiate all mockers.
  MockNcclApi();
  ~MockNcclApi() override;

  // Never looked into.
  static inline const ncclComm_t kComm = reinterpret_cast<ncclComm_t>(uintptr_t{0x10});
  static inline const ncclComm_t kSplitComm = reinterpret_cast<ncclComm_t>(uintptr_t{0x11});

  MOCK_METHOD(ncclResult_t, getUniqueId, (ncclUniqueId*), (override));
  MOCK_METHOD(ncclResult_t, commInitRankConfig, (ncclComm_t*, int, const ncclUniqueId&, int, ncclConfig_t*),
              (override));
  MOCK_METHOD(ncclResult_t, commSplit, (ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*), (override));
  MOCK_METHOD(ncclResult_t, commGetAsyncError, (ncclComm_t, ncclResult_t*), (override));
  MOCK_METHOD(ncclResult_t, commAbort, (ncclComm_t), (override));
  MOCK_METHOD(ncclResult_t, commFinalize, (ncclComm_t), (override));
  MOCK_METHOD(ncclResult_t, commDestroy, (ncclComm_t), (override));
  MOCK_METHOD(ncclResult_t, groupStart, (), (override));
  MOCK_METHOD(ncclResult_t, groupEnd, (), (override));
  MOCK_METHOD(ncclResult_t, broadcast, (const void*, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t),
              (override));
  MOCK_METHOD(ncclResult_t, allReduce,
              (const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t), (override));
  MOCK_METHOD(ncclResult_t, reduce,
              (const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, int, ncclComm_t, cudaStream_t), (override));
  MOCK_METHOD(ncclResult_t, allGather, (const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t),
              (override));
  MOCK_METHOD(ncclResult_t, reduceScatter,
              (const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t), (override));
  MOCK_METHOD(ncclResult_t, send, (const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t), (override));
  MOCK_METHOD(ncclResult_t, receive, (void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t), (override));
  MOCK_METHOD(ncclResult_t, redOpCreatePreMulSum,
              (ncclRedOp_t*, void*, ncclDataType_t, ncclScalarResidence_t, ncclComm_t), (override));
  MOCK_METHOD(ncclResult_t, redOpDestroy, (ncclRedOp_t, ncclComm_t), (override));
  MOCK_METHOD(std::string, describe, (ncclResult_t, ncclComm_t), (override));
};

// torch's own maker has another name in every few releases.
template <typename Factor>
c10d::ReduceOp preMulSum(Factor factor) {
  c10d::ReduceOp op;
  op.op_ = c10d::ReduceOp::PREMUL_SUM;
  op.supplement_ = c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(std::move(factor));
  return op;
}

}  // namespace bagua::testing
