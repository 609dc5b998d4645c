// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backend/cuda/nccl_handle.h"
#include "backend/cuda/nccl_network.h"

namespace bagua {

// Who takes part in a communicator.
struct NcclMembers {
  // Of the process group, for messages.
  std::string groupName;
  // Ranks in the process group, in the order of the communicator's own ranks.
  std::vector<int> ranks;
  // Position of this process in `ranks`.
  int self = 0;
  // Whether they are on several hosts.
  bool spansHosts = false;
};

// Brings the members of a communicator together through the store: each says that it has come, the first publishes
// NCCL's id and the terms, all initialise. Every rank uses the same key, once.
//
// Where the terms depend on the round trip between hosts, each member says how long one to the store takes, which is on
// one of the hosts, and the first waits for all of them. No connection is made for it. Three round trips are short
// beside what NCCL then does.
class NcclBootstrap {
 public:
  NcclBootstrap(NcclApi& api, c10::intrusive_ptr<c10d::Store> store, std::string key, NcclMembers members);

  // Collective. Either the handle is open afterwards, or it is aborted and a DistBackendError names who is missing.
  void connect(NcclHandle& handle, std::chrono::milliseconds timeout);

 private:
  // What the first member tells the others.
  struct Invitation {
    ncclUniqueId id;
    NcclTerms terms;
  };
  Invitation publishInvitation(const NcclHandle& handle, NcclHandle::Deadline deadline);
  Invitation receiveInvitation(const NcclHandle& handle, NcclHandle::Deadline deadline);
  void tellOfArrival();
  [[nodiscard]] bool wantsRoundTrip() const;
  // Zero where nobody wants to know it.
  std::chrono::microseconds measureRoundTrip();
  std::chrono::microseconds longestRoundTrip(const NcclHandle& handle, NcclHandle::Deadline deadline);
  // Until the keys are in the store; `what` has not come where they are not.
  void waitFor(const std::vector<std::string>& keys, const char* what, const NcclHandle& handle,
               NcclHandle::Deadline deadline);
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
