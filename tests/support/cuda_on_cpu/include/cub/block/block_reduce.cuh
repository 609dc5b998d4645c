// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstring>

namespace cub {

// As CUB documents it: thread 0 gets the result, and a storage may be used again once the block has passed a barrier.
// The other threads get garbage.
template <class T, int kThreads>
class BlockReduce {
 public:
  struct TempStorage {
    uint64_t lastUse;
  };

  explicit BlockReduce(TempStorage& storage) : storage_(storage) {}

  template <class Merge>
  T Reduce(const T& input, const Merge& merge, const std::source_location& where = std::source_location::current()) {
    struct Mine {
      T value;
      const Merge* merge;
      TempStorage* storage;
      const std::source_location& where;
    };
    if (blockDim.x != kThreads) cuda_on_cpu::fail("BlockReduce is made for blocks of another size", where);
    if (storage_.lastUse == cuda_on_cpu::epoch()) {
      cuda_on_cpu::fail("the storage is used again without a barrier in between", where);
    }
    Mine mine{input, &merge, &storage_, where};
    cuda_on_cpu::meet(cuda_on_cpu::Group::kBlock, where, &mine, [](void** all, unsigned count) {
      auto& first = *static_cast<Mine*>(all[0]);
      for (unsigned i = 1; i < count; ++i) {
        auto& other = *static_cast<Mine*>(all[i]);
        if (other.storage != first.storage) cuda_on_cpu::fail("the threads have several storages", first.where);
        first.value = (*first.merge)(first.value, other.value);
        std::memset(static_cast<void*>(&other.value), cuda_on_cpu::kGarbage, sizeof(T));
      }
      first.storage->lastUse = cuda_on_cpu::epoch();
    });
    return mine.value;
  }

 private:
  TempStorage& storage_;
};

}  // namespace cub
