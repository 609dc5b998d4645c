// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/nccl_bootstrap.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/operation/operation.h"

namespace bagua {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr int kRoundTrips = 3;
// The store is asked in slices, between which an abort is seen.
constexpr milliseconds kStoreSlice{1000};

milliseconds elapsed(Clock::time_point since) { return std::chrono::duration_cast<milliseconds>(Clock::now() - since); }

}  // namespace

NcclBootstrap::NcclBootstrap(NcclApi& api, c10::intrusive_ptr<c10d::Store> store, std::string key, NcclMembers members)
    : api_(api), store_(std::move(store)), key_(std::move(key)), members_(std::move(members)) {}

void NcclBootstrap::connect(NcclHandle& handle, milliseconds timeout) {
  const auto start = Clock::now();
  const auto deadline = start + timeout;
  // Before the first communicator of this process, also where that is of one host.
  if (usesOwnNet()) loadOwnNet(members_.spansHosts);
  try {
    tellOfArrival();
    const Invitation invitation =
        members_.self == 0 ? publishInvitation(handle, deadline) : receiveInvitation(handle, deadline);
    useSockets(invitation.terms);
    handle.init(static_cast<int>(members_.ranks.size()), members_.self, invitation.id, deadline,
                invitation.terms.maxCtas, members_.spansHosts && usesOwnNet() ? kOwnNet : nullptr);
  } catch (...) {
    handle.abort();
    TORCH_CHECK_WITH(DistBackendError, false, explain(messageOf(std::current_exception()), elapsed(start)));
  }
}

bool NcclBootstrap::wantsRoundTrip() const { return members_.spansHosts && bagua::wantsRoundTrip(); }

microseconds NcclBootstrap::measureRoundTrip() {
  if (!wantsRoundTrip()) return microseconds(0);
  microseconds shortest = microseconds::max();
  // The store may be busy with others.
  for (int i = 0; i < kRoundTrips; ++i) {
    const auto begin = Clock::now();
    static_cast<void>(store_->check({key_}));
    shortest = std::min(shortest, std::chrono::duration_cast<microseconds>(Clock::now() - begin));
  }
  return shortest;
}

void NcclBootstrap::tellOfArrival() {
  const std::string roundTrip = std::to_string(measureRoundTrip().count());
  store_->set(arrivalKey(members_.self), std::vector<uint8_t>(roundTrip.begin(), roundTrip.end()));
}

microseconds NcclBootstrap::longestRoundTrip(const NcclHandle& handle, NcclHandle::Deadline deadline) {
  if (!wantsRoundTrip()) return microseconds(0);
  std::vector<std::string> keys;
  for (size_t position = 0; position < members_.ranks.size(); ++position) keys.push_back(arrivalKey(position));
  waitFor(keys, "the other ranks", handle, deadline);
  microseconds longest(0);
  for (const auto& value : store_->multiGet(keys)) {
    longest = std::max(longest, microseconds(std::stoll(std::string(value.begin(), value.end()))));
  }
  return longest;
}

NcclBootstrap::Invitation NcclBootstrap::publishInvitation(const NcclHandle& handle, NcclHandle::Deadline deadline) {
  Invitation invitation{};
  const ncclResult_t result = api_.getUniqueId(&invitation.id);
  if (result != ncclSuccess) {
    // Anything that is not an invitation is an error text: the others need not wait for what will not come.
    const std::string text = "ncclGetUniqueId: " + api_.describe(result, nullptr);
    store_->set(key_ + "/id", std::vector<uint8_t>(text.begin(), text.end()));
    TORCH_CHECK_WITH(DistBackendError, false, text);
  }
  if (members_.spansHosts) invitation.terms = termsBetweenHosts(longestRoundTrip(handle, deadline));
  std::vector<uint8_t> bytes(sizeof(invitation));
  std::memcpy(bytes.data(), &invitation, sizeof(invitation));
  store_->set(key_ + "/id", bytes);
  return invitation;
}

NcclBootstrap::Invitation NcclBootstrap::receiveInvitation(const NcclHandle& handle, NcclHandle::Deadline deadline) {
  const std::string key = key_ + "/id";
  waitFor({key}, "NCCL's id", handle, deadline);
  const std::vector<uint8_t> bytes = store_->get(key);
  Invitation invitation{};
  TORCH_CHECK_WITH(DistBackendError, bytes.size() == sizeof(invitation), "rank ", members_.ranks.front(),
                   " has no NCCL id: ", std::string(bytes.begin(), bytes.end()));
  std::memcpy(&invitation, bytes.data(), sizeof(invitation));
  return invitation;
}

void NcclBootstrap::waitFor(const std::vector<std::string>& keys, const char* what, const NcclHandle& handle,
                            NcclHandle::Deadline deadline) {
  while (true) {
    TORCH_CHECK_WITH(DistBackendError, !handle.isAborted(), "aborted while waiting for ", what);
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
    TORCH_CHECK_WITH(DistBackendError, left.count() > 0, what, " did not come");
    const auto sliceStart = Clock::now();
    const auto slice = std::min(left, kStoreSlice);
    try {
      return store_->wait(keys, slice);
    } catch (const std::exception&) {
      // A slice that ended early did not time out: the store itself has failed.
      if (elapsed(sliceStart) < slice / 2) throw;
    }
  }
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
  if (missing.empty() && usesOwnNet()) {
    return c10::str(
        "Every rank has come this far. NCCL is to use NET/bagua, and loads it with the first communicator of "
        "a process: where another backend has made one before, type 'export NCCL_NET_PLUGIN=",
        ownNetPath(), "' before the program starts. NCCL_DEBUG=INFO says more.");
  }
  if (missing.empty()) {
    return "Every rank has come this far, so the network between them is to be checked: NCCL_SOCKET_IFNAME, firewalls, "
           "one GPU per rank; NCCL_DEBUG=INFO says more.";
  }
  return c10::str("Never got here: rank ", c10::Join(", ", missing),
                  ". Check that these processes are alive and make the same collective calls in the same order.");
}

}  // namespace bagua
