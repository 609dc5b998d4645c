// SPDX-License-Identifier: Apache-2.0
#include "backend/nccl/nccl_bootstrap.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/operation/operation.h"

namespace bagua {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// The store is asked in slices, between which an abort is seen.
constexpr milliseconds kStoreSlice{1000};

milliseconds elapsed(Clock::time_point since) { return std::chrono::duration_cast<milliseconds>(Clock::now() - since); }

}  // namespace

NcclBootstrap::NcclBootstrap(NcclApi& api, c10::intrusive_ptr<c10d::Store> store, std::string key, NcclMembers members)
    : api_(api), store_(std::move(store)), key_(std::move(key)), members_(std::move(members)) {}

void NcclBootstrap::connect(NcclHandle& handle, milliseconds timeout) {
  const auto start = Clock::now();
  const auto deadline = start + timeout;
  try {
    const ncclUniqueId id = exchangeId(handle, deadline);
    handle.init(static_cast<int>(members_.ranks.size()), members_.self, id, deadline);
  } catch (...) {
    handle.abort();
    TORCH_CHECK_WITH(DistBackendError, false, explain(messageOf(std::current_exception()), elapsed(start)));
  }
}

ncclUniqueId NcclBootstrap::exchangeId(const NcclHandle& handle, NcclHandle::Deadline deadline) {
  store_->set(arrivalKey(members_.self), std::vector<uint8_t>{1});
  return members_.self == 0 ? publishId() : receiveId(handle, deadline);
}

ncclUniqueId NcclBootstrap::publishId() {
  ncclUniqueId id;
  const ncclResult_t result = api_.getUniqueId(&id);
  if (result != ncclSuccess) {
    // Anything that is not an id is an error text: the others need not wait for what will not come.
    const std::string text = "ncclGetUniqueId: " + api_.describe(result, nullptr);
    store_->set(key_ + "/id", std::vector<uint8_t>(text.begin(), text.end()));
    TORCH_CHECK_WITH(DistBackendError, false, text);
  }
  std::vector<uint8_t> bytes(sizeof(id));
  std::memcpy(bytes.data(), &id, sizeof(id));
  store_->set(key_ + "/id", bytes);
  return id;
}

ncclUniqueId NcclBootstrap::receiveId(const NcclHandle& handle, NcclHandle::Deadline deadline) {
  const std::string key = key_ + "/id";
  while (true) {
    TORCH_CHECK_WITH(DistBackendError, !handle.isAborted(), "aborted while waiting for NCCL's id");
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
    TORCH_CHECK_WITH(DistBackendError, left.count() > 0, "NCCL's id did not come");
    const auto sliceStart = Clock::now();
    const auto slice = std::min(left, kStoreSlice);
    try {
      store_->wait({key}, slice);
      break;
    } catch (const std::exception&) {
      // A slice that ended early did not time out: the store itself has failed.
      if (elapsed(sliceStart) < slice / 2) throw;
    }
  }
  const std::vector<uint8_t> bytes = store_->get(key);
  ncclUniqueId id;
  TORCH_CHECK_WITH(DistBackendError, bytes.size() == sizeof(id), "rank ", members_.ranks.front(),
                   " has no NCCL id: ", std::string(bytes.begin(), bytes.end()));
  std::memcpy(&id, bytes.data(), sizeof(id));
  return id;
}

std::string NcclBootstrap::arrivalKey(size_t position) const {
  return c10::str(key_, "/arrived/", members_.ranks[position]);
}

std::string NcclBootstrap::explain(const std::string& cause, milliseconds waited) {
  return c10::str("NCCL communicator '", key_, "' of group '", members_.groupName, "': rank ",
                  members_.ranks[members_.self], " could not connect to the other ranks (", members_.ranks.size(),
                  " in all) and gave up after ", waited.count(), " ms: ", cause, ". ", advice());
}

std::string NcclBootstrap::advice() {
  std::vector<int> missing;
  try {
    for (size_t position = 0; position < members_.ranks.size(); ++position) {
      if (!store_->check({arrivalKey(position)})) missing.push_back(members_.ranks[position]);
    }
  } catch (const std::exception&) {
    return c10::str("The store does not answer either (", messageOf(std::current_exception()),
                    "): check that the process that hosts it, usually rank 0, is alive.");
  }
  if (missing.empty()) {
    return "Every rank has come this far, so the network between them is to be checked: NCCL_SOCKET_IFNAME, firewalls, "
           "one GPU per rank; NCCL_DEBUG=INFO says more.";
  }
  return c10::str("Never got here: rank ", c10::Join(", ", missing),
                  ". Check that these processes are alive and make the same collective calls in the same order.");
}

}  // namespace bagua
