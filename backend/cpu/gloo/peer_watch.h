// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/torch_compat.h"

namespace bagua {

// Notices that a peer has died also while nothing is under way with it, as where all wait for a rank that is slow.
// Every rank says farewell to all others when it leaves: a connection that ends before that has lost its peer. Over any
// c10d backend whose sends and receives end with the connection (Gloo's do). Methods may be called from any thread.
class PeerWatch {
 public:
  explicit PeerWatch(c10::intrusive_ptr<c10d::Backend> backend);

  // The first peer found to have gone without a farewell, in words. Blocks for nothing.
  std::optional<std::string> findLost();
  // Says farewell, and watches no longer. Idempotent; waits for nothing.
  void leave();

 private:
  struct Expected {
    int peer;
    c10::intrusive_ptr<c10d::Work> farewell;
  };

  const c10::intrusive_ptr<c10d::Backend> backend_;
  std::mutex mutex_;
  std::vector<Expected> expected_;
  std::vector<c10::intrusive_ptr<c10d::Work>> sent_;
  std::optional<std::string> lost_;
};

}  // namespace bagua
