// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <vector>

#include "backend/communicator.h"

namespace bagua {

// Moves bytes between ranks. Used by one thread, but for abort().
class Wire {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // What goes to and what comes from one rank, as flat tensors of bytes; either may be empty. With this rank itself:
  // a copy.
  struct Exchange {
    int peer;
    at::Tensor sent;
    at::Tensor received;
  };

  Wire(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~Wire() = default;
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }

  // Returns when all have been sent and received. Two ranks that exchange several things name them in the same order,
  // with the same sizes.
  void swap(const std::vector<Exchange>& exchanges, Deadline deadline) { swapInPieces(exchanges, {}, {}, deadline); }
  // A step that is not set is not taken. A piece of `passedOn` is exchanged once that piece of `exchanges` has come and
  // gone and been used: it may send what came of that, and be received where that was sent from.
  virtual void swapInPieces(const std::vector<Exchange>& exchanges, const Pipeline& pipeline,
                            const std::vector<Exchange>& passedOn, Deadline deadline) = 0;
  // Has swap() throw, also one that is under way. From any thread.
  virtual void abort() = 0;

 private:
  const int rank_;
  const int size_;
};

}  // namespace bagua
