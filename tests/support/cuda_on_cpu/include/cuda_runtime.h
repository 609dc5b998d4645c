// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <source_location>
#include <type_traits>
#include <utility>

#include "tests/support/cuda_on_cpu/grid.h"

// What our CUDA sources take from the CUDA runtime and from nvcc, for a C++ compiler: the kernels run on the CPU
// (grid.h). What they begin to use is added here; what is not here does not compile.

// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming): its names
#define __global__
#define __device__
#define __launch_bounds__(...)
// shared_memory.ld collects the static variables of CUDA sources.
#define __shared__ static

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
using cudaStream_t = struct CUstream_st*;

struct dim3 {
  explicit dim3(unsigned of) : x(of) {}
  unsigned x;
};

// Defined in grid.cpp: a variable of a CUDA source is shared memory.
struct CudaIndex {
  unsigned x;
};
extern CudaIndex threadIdx;
extern CudaIndex blockIdx;
extern CudaIndex blockDim;
extern CudaIndex gridDim;

cudaError_t cudaGetLastError();

namespace cuda_on_cpu {

void setLastError(cudaError_t error);

// What a thread takes to a shuffle.
template <class T>
struct Shuffled {
  T value;
  unsigned from;

  static void exchange(void** all, unsigned count) {
    T values[kWarp];
    for (unsigned i = 0; i < count; ++i) values[i] = static_cast<Shuffled*>(all[i])->value;
    for (unsigned i = 0; i < count; ++i) {
      auto& mine = *static_cast<Shuffled*>(all[i]);
      // Of a lane that there is not, the own one.
      if (mine.from < count) mine.value = values[mine.from];
    }
  }
};

}  // namespace cuda_on_cpu

template <class... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, void** arguments,
                             size_t /*sharedBytes*/, cudaStream_t /*stream*/) {
  if (grid.x == 0 || grid.x > 0x7FFFFFFFU || block.x == 0 || block.x > 1024) {
    cuda_on_cpu::setLastError(cudaErrorInvalidConfiguration);
    return cudaErrorInvalidConfiguration;
  }
  const auto run = [&]<size_t... kPlaces>(std::index_sequence<kPlaces...>) {
    cuda_on_cpu::runGrid(grid.x, block.x, [&] { kernel(*static_cast<Parameters*>(arguments[kPlaces])...); });
  };
  run(std::index_sequence_for<Parameters...>());
  return cudaSuccess;
}

using std::max;

inline int32_t __float_as_int(float x) { return std::bit_cast<int32_t>(x); }
inline float __int_as_float(int32_t x) { return std::bit_cast<float>(x); }

inline void __syncthreads(const std::source_location& where = std::source_location::current()) {
  cuda_on_cpu::barrier(where);
}

template <class T>
T __shfl_xor_sync(unsigned threads, T value, int laneMask,
                  const std::source_location& where = std::source_location::current()) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "CUDA shuffles words of 4 or 8 bytes");
  if (threads != 0xFFFFFFFFU) cuda_on_cpu::fail("shuffles of less than a warp are not emulated", where);
  cuda_on_cpu::Shuffled<T> mine{value, threadIdx.x % cuda_on_cpu::kWarp ^ static_cast<unsigned>(laneMask)};
  cuda_on_cpu::meet(cuda_on_cpu::Group::kWarp, where, &mine, mine.exchange);
  return mine.value;
}
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)
