// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <utility>

#include "backend/cuda/nccl_api.h"

namespace bagua {

// Owns one non-blocking NCCL communicator: but for its end, NCCL's calls return at once and are polled here, so that
// none of them can hang. call() comes from one thread at a time; abort(), asyncError() and isAborted() from any.
class NcclHandle {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // `prepareThread` runs first in the thread that ends what a CUDA graph holds.
  explicit NcclHandle(
      NcclApi& api, std::function<void()> prepareThread = [] {})
      : api_(api), prepareThread_(std::move(prepareThread)) {}
  // Aborts a communicator that close() has not ended: waiting for peers has no place here.
  ~NcclHandle();
  NcclHandle(const NcclHandle&) = delete;
  NcclHandle& operator=(const NcclHandle&) = delete;

  // Collective. `maxCtas` as in NcclTerms.
  void init(int size, int rank, const ncclUniqueId& id, Deadline deadline, int maxCtas = NCCL_CONFIG_UNDEF_INT,
            const char* net = nullptr);
  // Collective among the ranks of `parent`, no call of which may be under way on the device: those with one color get a
  // communicator, in the order of their keys. It has no limit of CTAs, whatever its parent has.
  void split(NcclHandle& parent, int color, int key, Deadline deadline);
  [[nodiscard]] bool isOpen() const;

  // Makes one NCCL call and returns when NCCL has done its part on the CPU: only then is the work on the stream.
  void call(const char* what, Deadline deadline, const std::function<ncclResult_t(ncclComm_t)>& enqueue);

  // Collective. Aborts where the peers do not follow in time.
  void close(Deadline deadline);
  // Ends the communicator and whatever it runs on the device. Final. Other calls do not wait for it.
  void abort();
  // Calls from now on are recorded into a CUDA graph. NCCL gives a communicator up only when all such graphs are gone,
  // which may be never: abort() then leaves the waiting to a thread of its own.
  void enterGraph();
  [[nodiscard]] bool isAborted() const;
  // What has gone wrong since the last call, on this rank or at a peer. Empty: nothing, or a call is just being made.
  [[nodiscard]] std::string asyncError();

 private:
  void finish(const char* what, ncclResult_t result, Deadline deadline);
  [[nodiscard]] bool isInGraph() const;
  // Nobody else can reach the communicator any more, so this may take its time.
  static void abort(NcclApi& api, ncclComm_t comm);
  void checkOpen(const char* what) const;

  NcclApi& api_;
  const std::function<void()> prepareThread_;
  // Held during every NCCL call on comm_, none of which blocks. ncclCommAbort and ncclCommDestroy do, and free it: they
  // are called with what comm_ held before.
  mutable std::mutex mutex_;
  ncclComm_t comm_ = nullptr;
  bool isAborted_ = false;
  bool isInGraph_ = false;
};

}  // namespace bagua
