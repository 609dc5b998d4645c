// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <source_location>

// Runs grids of CUDA threads on one thread of the CPU: the blocks one after another, the threads of a block as fibers.
// A thread runs until it meets others, at a barrier for instance. Which one runs next, and which block, is drawn at
// random. Shared memory is filled with garbage before each block. A grid whose threads do not all meet at the same
// place ends with a std::logic_error that tells the place, the block and the threads.
namespace cuda_on_cpu {

// Of the device, for a test to set and to read.
struct Device {
  int multiprocessors = 1;
  // Of the order of blocks and threads in the next grid. The grid after it has another one.
  uint64_t seed = 1;
  int64_t launches = 0;
};

Device& device();

constexpr unsigned kWarp = 32;
constexpr int kGarbage = 0xA5;

// Calls `thread` for each thread of each block.
void runGrid(unsigned blocks, unsigned threads, const std::function<void()>& thread);

// What follows is for threads of a grid.

enum class Group { kWarp, kBlock };

// Returns when all threads of the group have come to `where`. The last one calls `exchange` with the `mine` of all, in
// the order of the threads, before any of them goes on.
void meet(Group group, const std::source_location& where, void* mine = nullptr,
          void (*exchange)(void** all, unsigned count) = nullptr);

void barrier(const std::source_location& where);

// A number that changes when the block passes a barrier, and that no other block has.
uint64_t epoch();

// Ends the grid.
[[noreturn]] void fail(const char* what, const std::source_location& where);

}  // namespace cuda_on_cpu
