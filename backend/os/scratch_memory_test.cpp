// SPDX-License-Identifier: Apache-2.0
#include "backend/os/scratch_memory.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace bagua {
namespace {

constexpr int64_t kMegabyte = int64_t{1} << 20;

// Where the memory of another thread was, which it has returned.
const void* usedByAnotherThread(ScratchMemory& memory, int64_t bytes) {
  const void* place = nullptr;
  std::thread([&] { place = memory.take(bytes).get(); }).join();
  return place;
}

TEST(ScratchMemory, ThreadsUseTheSameMemoryOneAfterTheOther) {
  ScratchMemory memory;
  const void* const first = usedByAnotherThread(memory, 7 * kMegabyte);
  EXPECT_EQ(usedByAnotherThread(memory, 7 * kMegabyte), first);
  EXPECT_EQ(memory.take(5 * kMegabyte).get(), first);
  EXPECT_EQ(memory.heldBytes(), 7 * kMegabyte);
}

TEST(ScratchMemory, WhatIsInUseIsNobodyElses) {
  ScratchMemory memory;
  const auto one = memory.take(kMegabyte);
  auto other = memory.take(kMegabyte);
  EXPECT_NE(one, other);
  const auto alsoOther = other;
  other.reset();
  EXPECT_NE(memory.take(kMegabyte), alsoOther);
}

TEST(ScratchMemory, TheShortestBlockThatIsLongEnoughIsTakenAndNoneOfMoreThanTwiceTheLength) {
  ScratchMemory memory;
  const void* longer = nullptr;
  const void* shorter = nullptr;
  {
    const auto one = memory.take(20 * kMegabyte);
    const auto other = memory.take(11 * kMegabyte);
    longer = one.get();
    shorter = other.get();
  }
  const auto first = memory.take(10 * kMegabyte);
  const auto second = memory.take(10 * kMegabyte);
  EXPECT_EQ(first.get(), shorter);
  EXPECT_EQ(second.get(), longer);
  EXPECT_EQ(memory.heldBytes(), 31 * kMegabyte);
  ScratchMemory another;
  another.take(20 * kMegabyte).reset();
  const auto small = another.take(9 * kMegabyte);
  EXPECT_EQ(another.heldBytes(), 9 * kMegabyte);  // The block of 20 is more than was ever in use beside it.
}

TEST(ScratchMemory, HoldsNoMoreThanWasInUseAtOnce) {
  ScratchMemory memory;
  for (int64_t megabytes = 1; megabytes <= 30; ++megabytes) memory.take(megabytes * kMegabyte).reset();
  EXPECT_EQ(memory.heldBytes(), 30 * kMegabyte);
  {
    const auto one = memory.take(20 * kMegabyte);
    const auto other = memory.take(20 * kMegabyte);
  }
  EXPECT_EQ(memory.heldBytes(), 50 * kMegabyte);
  memory.take(25 * kMegabyte).reset();
  EXPECT_EQ(memory.heldBytes(), 50 * kMegabyte);
}

TEST(ScratchMemory, ManyThreadsTakeAndReturn) {
  ScratchMemory memory;
  std::atomic<int> strangers = 0;
  std::vector<std::thread> threads;
  for (uint8_t own = 1; own <= 8; ++own) {
    threads.emplace_back([&, own] {
      for (int turn = 0; turn < 200; ++turn) {
        const auto block = memory.take((1 + turn % 7) * kMegabyte / 2);
        auto* const byte = static_cast<volatile uint8_t*>(block.get());
        *byte = own;
        std::this_thread::yield();
        if (*byte != own) ++strangers;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(strangers, 0);
  EXPECT_LE(memory.heldBytes(), 8 * 2 * 4 * kMegabyte);
}

TEST(ScratchMemory, AForkedChildCanUseIt) {
  std::atomic<bool> isOver = false;
  std::thread busy([&] {
    while (!isOver) scratchTensor({kMegabyte}, at::kByte);
  });
  for (int turn = 0; turn < 20; ++turn) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);
      ::_exit(ScratchMemory::ofProcess().take(kMegabyte) != nullptr ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  isOver = true;
  busy.join();
}

TEST(ScratchTensor, HasTheSizesAndTypeAskedForAndIsAligned) {
  for (const int64_t rows : {0, 10, 1000, 40000}) {
    const at::Tensor like = at::ones({rows, 300}, at::kDouble);
    const at::Tensor same = scratchLike(like);
    EXPECT_EQ(same.sizes(), like.sizes());
    EXPECT_EQ(same.scalar_type(), at::kDouble);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(same.const_data_ptr()) % 64, 0);
    const at::Tensor half = scratchCopy(like, at::kHalf);
    EXPECT_EQ(half.scalar_type(), at::kHalf);
    EXPECT_EQ(half.sum(at::kDouble).item<double>(), 300.0 * static_cast<double>(rows));
  }
}

TEST(ScratchTensor, AViewKeepsTheMemory) {
  at::Tensor whole = scratchTensor({kMegabyte}, at::kByte);
  const at::Tensor view = whole.narrow(0, 5, 10).fill_(7);
  whole.reset();
  scratchTensor({kMegabyte}, at::kByte).fill_(0);
  EXPECT_EQ(view.sum().item<int64_t>(), 70);
}

}  // namespace
}  // namespace bagua
