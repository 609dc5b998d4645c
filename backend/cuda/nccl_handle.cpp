// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/nccl_handle.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "backend/cuda/run_together.h"
#include "backend/operation/operation.h"

namespace bagua {
namespace {

// An enqueueing takes tens of microseconds: yield that long, then sleep.
constexpr int kBusyPolls = 200;
constexpr auto kPollInterval = std::chrono::microseconds(200);

ncclConfig_t configOf(int maxCtas, const char* net) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.maxCTAs = maxCtas;
  config.netName = net;
  return config;
}

}  // namespace

NcclHandle::~NcclHandle() { abort(); }

void NcclHandle::checkOpen(const char* what) const {
  TORCH_CHECK_WITH(DistBackendError, !isAborted_, what, ": the NCCL communicator has been aborted");
  TORCH_CHECK_WITH(DistBackendError, comm_ != nullptr, what, ": there is no NCCL communicator");
}

void NcclHandle::init(int size, int rank, const ncclUniqueId& id, Deadline deadline, int maxCtas, const char* net) {
  constexpr const char* kWhat = "ncclCommInitRankConfig";
  ncclResult_t result;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK_WITH(DistBackendError, !isAborted_, kWhat, ": the NCCL communicator has been aborted");
    TORCH_INTERNAL_ASSERT(comm_ == nullptr, "one NcclHandle holds one communicator");
    ncclConfig_t config = configOf(maxCtas, net);
    result = api_.commInitRankConfig(&comm_, size, id, rank, &config);
  }
  finish(kWhat, result, deadline);
}

void NcclHandle::split(NcclHandle& parent, int color, int key, Deadline deadline) {
  constexpr const char* kWhat = "ncclCommSplit";
  // Written by a thread of NCCL's, before the parent is ready again. If the parent is given up before, that thread may
  // still be at work: it then keeps what it writes to.
  auto made = std::make_unique<ncclComm_t>(nullptr);
  try {
    parent.call(kWhat, deadline, [&](ncclComm_t comm) {
      ncclConfig_t config = configOf(NCCL_CONFIG_UNDEF_INT, nullptr);
      const ncclResult_t result = api_.commSplit(comm, color, key, made.get(), &config);
      // Success means that it has begun; only the parent's state tells when it has ended.
      return result == ncclSuccess ? ncclInProgress : result;
    });
  } catch (...) {
    [[maybe_unused]] ncclComm_t* const left = made.release();
    throw;
  }
  bool isUnwanted = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_INTERNAL_ASSERT(comm_ == nullptr, "one NcclHandle holds one communicator");
    isUnwanted = isAborted_;
    if (!isUnwanted) comm_ = *made;
  }
  if (isUnwanted) abort(api_, *made);
  call(kWhat, deadline, [](ncclComm_t) { return ncclInProgress; });
}

bool NcclHandle::isOpen() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return comm_ != nullptr;
}

void NcclHandle::call(const char* what, Deadline deadline, const std::function<ncclResult_t(ncclComm_t)>& enqueue) {
  ncclResult_t result;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    checkOpen(what);
    result = enqueue(comm_);
  }
  finish(what, result, deadline);
}

void NcclHandle::finish(const char* what, ncclResult_t result, Deadline deadline) {
  for (int polls = 0; result == ncclInProgress; ++polls) {
    TORCH_CHECK_WITH(DistBackendError, std::chrono::steady_clock::now() < deadline, what,
                     " has not returned within its time limit");
    if (polls < kBusyPolls) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kPollInterval);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    checkOpen(what);
    const ncclResult_t query = api_.commGetAsyncError(comm_, &result);
    if (query != ncclSuccess) result = query;
  }
  if (result == ncclSuccess) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, false, what, ": ", api_.describe(result, comm_));
}

void NcclHandle::close(Deadline deadline) {
  if (!isOpen()) return;
  try {
    call("ncclCommFinalize", deadline, [this](ncclComm_t comm) { return api_.commFinalize(comm); });
  } catch (...) {
    const std::string cause = messageOf(std::current_exception());
    const std::string advice =
        isInGraph() ? ". A CUDA graph that holds its calls has to be deleted before its process group is destroyed"
                    : "";
    LOG(WARNING) << "bagua: aborting an NCCL communicator that could not be ended in order: " << cause << advice;
    abort();
    return;
  }
  ncclComm_t comm = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    comm = std::exchange(comm_, nullptr);
  }
  if (comm == nullptr) return;
  const ncclResult_t result = api_.commDestroy(comm);
  if (result != ncclSuccess && result != ncclInProgress) {
    LOG(WARNING) << "bagua: ncclCommDestroy: " << api_.describe(result, nullptr);
  }
}

void NcclHandle::abort() {
  ncclComm_t comm = nullptr;
  bool isInGraph = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    isAborted_ = true;
    comm = std::exchange(comm_, nullptr);
    isInGraph = isInGraph_;
  }
  if (comm == nullptr) return;
  if (isInGraph) {
    try {
      std::thread(inOwnThread(prepareThread_, [&api = api_, comm] { abort(api, comm); })).detach();
    } catch (const std::system_error& error) {
      LOG(WARNING)
          << "bagua: an NCCL communicator that a CUDA graph holds stays open, for want of a thread to wait for "
          << "that graph: " << error.what();
    }
  } else {
    abort(api_, comm);
  }
}

void NcclHandle::abort(NcclApi& api, ncclComm_t comm) {
  const ncclResult_t result = api.commAbort(comm);
  if (result != ncclSuccess && result != ncclInProgress) {
    LOG(WARNING) << "bagua: ncclCommAbort: " << api.describe(result, nullptr);
  }
}

void NcclHandle::enterGraph() {
  const std::lock_guard<std::mutex> lock(mutex_);
  isInGraph_ = true;
}

bool NcclHandle::isAborted() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return isAborted_;
}

bool NcclHandle::isInGraph() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return isInGraph_;
}

std::string NcclHandle::asyncError() {
  // Whoever holds it is in an NCCL call, the first of which may wait for the device, and looks at its result himself.
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || comm_ == nullptr) return "";
  ncclResult_t state = ncclSuccess;
  const ncclResult_t query = api_.commGetAsyncError(comm_, &state);
  if (query != ncclSuccess) state = query;
  return state == ncclSuccess || state == ncclInProgress ? "" : api_.describe(state, comm_);
}

}  // namespace bagua
