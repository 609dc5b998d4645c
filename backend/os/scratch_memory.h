// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/os/fork_held_mutex.h"

namespace bagua {

// Tensors for the time of one exchange. On the CPU, exchanges of all groups and threads share what earlier ones have
// returned: the C library keeps freed memory for the thread that had it, and with a thread per channel a process with
// 50 MB of weights grew by 1.6 GB. On other devices torch's allocator shares it already. Such a tensor cannot be
// resized, and must not be kept: its memory would be lost to the others.
at::Tensor scratchTensor(at::IntArrayRef sizes, const at::TensorOptions& options);
at::Tensor scratchLike(const at::Tensor& like);
at::Tensor scratchCopy(const at::Tensor& values, at::ScalarType dtype);

// Blocks of memory that are used again. It never holds more than were in use at once, and a block is at most twice as
// long as what it is taken for. All methods may be called from any thread.
class ScratchMemory {
 public:
  class Block;

  ScratchMemory();
  ~ScratchMemory();
  ScratchMemory(const ScratchMemory&) = delete;
  ScratchMemory& operator=(const ScratchMemory&) = delete;

  // The process's. Never destroyed: a tensor may outlive the static objects. A fork finds it in order.
  static ScratchMemory& ofProcess();

  // At least `bytes`, on a page of its own. Returned with the last reference.
  std::shared_ptr<void> take(int64_t bytes);
  // Of all blocks, in use or not.
  [[nodiscard]] int64_t heldBytes();

 private:
  std::unique_ptr<Block> takeIdle(int64_t bytes);
  void giveBack(std::unique_ptr<Block> block) noexcept;

  ForkHeldMutex mutex_;
  // The one that was returned last is at the end. Has room for all blocks, so that returning one allocates nothing.
  std::vector<std::unique_ptr<Block>> idle_;
  size_t blocks_ = 0;
  int64_t heldBytes_ = 0;
  int64_t inUse_ = 0;
  int64_t mostInUse_ = 0;
};

}  // namespace bagua
