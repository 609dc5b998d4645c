// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/nccl_api_mock.h"

namespace bagua::testing {

using ::testing::DoAll;
using ::testing::Return;
using ::testing::SetArgPointee;

MockNcclApi::MockNcclApi() {
  ON_CALL(*this, commInitRankConfig).WillByDefault(DoAll(SetArgPointee<0>(kComm), Return(ncclSuccess)));
  ON_CALL(*this, commSplit).WillByDefault(DoAll(SetArgPointee<3>(kSplitComm), Return(ncclSuccess)));
  ON_CALL(*this, commGetAsyncError).WillByDefault(DoAll(SetArgPointee<1>(ncclSuccess), Return(ncclSuccess)));
  ON_CALL(*this, describe).WillByDefault([](ncclResult_t result, ncclComm_t) {
    return "nccl says " + std::to_string(static_cast<int>(result));
  });
}

MockNcclApi::~MockNcclApi() = default;

}  // namespace bagua::testing
