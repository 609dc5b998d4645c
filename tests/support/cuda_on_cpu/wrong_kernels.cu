// SPDX-License-Identifier: Apache-2.0
#include <cub/block/block_reduce.cuh>

#include "kernels/launch.cuh"
#include "tests/support/cuda_on_cpu/wrong_kernels.h"

namespace cuda_on_cpu {
namespace {

using BlockReduce = cub::BlockReduce<int32_t, kThreads>;

struct Add {
  __device__ int32_t operator()(int32_t a, int32_t b) const { return a + b; }
};

__device__ int32_t numberOfThread() { return static_cast<int32_t>(threadIdx.x); }

__device__ int32_t* resultOfThread(int32_t* results) { return results + size_t{blockIdx.x} * kThreads + threadIdx.x; }

__global__ void sums(int32_t* results) {
  __shared__ BlockReduce::TempStorage scratch;
  __shared__ int32_t ofBlock;
  int32_t ofWarp = numberOfThread();
  for (int stride = 16; stride > 0; stride /= 2) ofWarp += __shfl_xor_sync(0xFFFFFFFF, ofWarp, stride);
  const int32_t all = BlockReduce(scratch).Reduce(numberOfThread(), Add{});
  if (threadIdx.x == 0) ofBlock = all;
  __syncthreads();
  *resultOfThread(results) = ofBlock - ofWarp;
}

__global__ void barrierOfSome(int32_t* results) {
  if (threadIdx.x != 7) __syncthreads();
  *resultOfThread(results) = 0;
}

__global__ void barrierOfEachHalf(int32_t* results) {
  if (threadIdx.x < kThreads / 2) {
    __syncthreads();
  } else {
    *resultOfThread(results) = 0;
    __syncthreads();
  }
}

__global__ void shuffleOfSome(int32_t* results) {
  int32_t number = numberOfThread();
  if (threadIdx.x % 32 < 16) number = __shfl_xor_sync(0xFFFFFFFF, number, 1);
  *resultOfThread(results) = number;
}

__global__ void storageUsedTwice(int32_t* results) {
  __shared__ BlockReduce::TempStorage scratch;
  const int32_t once = BlockReduce(scratch).Reduce(1, Add{});
  *resultOfThread(results) = once + BlockReduce(scratch).Reduce(1, Add{});
}

__global__ void resultOfReductionInAllThreads(int32_t* results) {
  __shared__ BlockReduce::TempStorage scratch;
  *resultOfThread(results) = BlockReduce(scratch).Reduce(1, Add{});
}

__global__ void sharedMemoryThatNobodyWrote(int32_t* results) {
  __shared__ int32_t numbers[kThreads];
  *resultOfThread(results) = numbers[threadIdx.x];
  numbers[threadIdx.x] = 1;
}

__global__ void sharedMemoryReadWithoutBarrier(int32_t* results) {
  __shared__ int32_t number;
  if (threadIdx.x == 0) number = 1;
  *resultOfThread(results) = number;
}

__global__ void order(int32_t* results) {
  __shared__ int32_t next;
  if (threadIdx.x == 0) next = 0;
  __syncthreads();
  *resultOfThread(results) = next++;
}

}  // namespace

void run(Kernel kernel, unsigned blocks, int32_t* results) {
  constexpr void (*kKernels[])(int32_t*) = {
      sums,
      barrierOfSome,
      barrierOfEachHalf,
      shuffleOfSome,
      storageUsedTwice,
      resultOfReductionInAllThreads,
      sharedMemoryThatNobodyWrote,
      sharedMemoryReadWithoutBarrier,
      order,
  };
  bagua::launchKernel(kKernels[static_cast<int>(kernel)], blocks, kThreads, nullptr, results);
}

}  // namespace cuda_on_cpu
