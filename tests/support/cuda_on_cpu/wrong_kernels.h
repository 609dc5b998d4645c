// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// Kernels for the tests of the emulation: a right one, and some that are wrong, each in its own way. All write a number
// for each thread of each block.
namespace cuda_on_cpu {

constexpr unsigned kThreads = 96;

enum class Kernel {
  // The sum of the numbers of the threads, by shuffles of warps and by a reduction of the block.
  kSums,
  kBarrierOfSome,
  kBarrierOfEachHalf,
  kShuffleOfSome,
  kStorageUsedTwice,
  kResultOfReductionInAllThreads,
  kSharedMemoryThatNobodyWrote,
  kSharedMemoryReadWithoutBarrier,
  // How many threads of the block came before.
  kOrder,
};

void run(Kernel kernel, unsigned blocks, int32_t* results);

}  // namespace cuda_on_cpu
