// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backend/nccl/nccl_handle.h"

namespace bagua {

// Who takes part in a communicator.
struct NcclMembers {
  // Of the process group, for messages.
  std::string groupName;
  // Ranks in the process group, in the order of the communicator's own ranks.
  std::vector<int> ranks;
  // Position of this process in `ranks`.
  int self = 0;
};

// Brings the members of a communicator together through the store: each says that it has come, the first publishes
// NCCL's id, all initialise. Every rank uses the same key, once.
class NcclBootstrap {
 public:
  NcclBootstrap(NcclApi& api, c10::intrusive_ptr<c10d::Store> store, std::string key, NcclMembers members);

  // Collective. Either the handle is open afterwards, or it is aborted and a DistBackendError names who is missing.
  void connect(NcclHandle& handle, std::chrono::milliseconds timeout);

 private:
  ncclUniqueId exchangeId(const NcclHandle& handle, NcclHandle::Deadline deadline);
  ncclUniqueId publishId();
  ncclUniqueId receiveId(const NcclHandle& handle, NcclHandle::Deadline deadline);
  [[nodiscard]] std::string arrivalKey(size_t position) const;
  [[nodiscard]] std::string explain(const std::string& cause, std::chrono::milliseconds waited);
  // Which ranks have not come, and what to check.
  [[nodiscard]] std::string advice();

  NcclApi& api_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string key_;
  const NcclMembers members_;
};

}  // namespace bagua
