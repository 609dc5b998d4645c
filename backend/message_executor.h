// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <chrono>

#include "backend/executor.h"

namespace bagua {

// What c10d asks of an executor besides programs. Algorithms see none of it. All methods may be called from any thread.
class MessageExecutor : public virtual Executor {
 public:
  // Messages between two ranks: not part of the order of programs. peer == kAnySource receives from whoever sends.
  static constexpr int kAnySource = -1;
  virtual c10::intrusive_ptr<c10d::Work> send(Operation operation, at::Tensor tensor, int tag) = 0;
  virtual c10::intrusive_ptr<c10d::Work> receive(Operation operation, at::Tensor tensor, int tag) = 0;

  // See cpu/monitored_barrier.h. CPU only.
  virtual void monitoredBarrier(std::chrono::milliseconds /*timeout*/, bool /*waitAllRanks*/) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "bagua: monitored_barrier is for CPU tensors");
  }

  // The operations between the two calls are one unit, completed by the Work that endGroup returns.
  virtual void startGroup() = 0;
  virtual c10::intrusive_ptr<c10d::Work> endGroup() = 0;
  // Forgets a group that was started and will not be ended, as the next start does.
  virtual void dropGroup() = 0;
};

}  // namespace bagua
