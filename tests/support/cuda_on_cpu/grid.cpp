// SPDX-License-Identifier: Apache-2.0
#include "tests/support/cuda_on_cpu/grid.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/support/cuda_on_cpu/fiber.h"

// Where shared_memory.ld puts it.
extern "C" uint64_t cuda_shared_memory_begin[];
extern "C" uint64_t cuda_shared_memory_end[];

CudaIndex threadIdx;
CudaIndex blockIdx;
CudaIndex blockDim;
CudaIndex gridDim;

namespace cuda_on_cpu {
namespace {

cudaError_t lastError = cudaSuccess;

// What lies between two variables belongs to AddressSanitizer, which would stop memset().
__attribute__((noinline, no_sanitize("address"))) void fillSharedMemory() {
  constexpr uint64_t kFill = 0x0101010101010101U * kGarbage;
  for (volatile uint64_t* word = cuda_shared_memory_begin; word < cuda_shared_memory_end; ++word) *word = kFill;
}

std::string toString(const std::source_location& where) {
  return std::string(where.file_name()) + ":" + std::to_string(where.line()) + " in " + where.function_name();
}

bool isSame(const std::source_location& one, const std::source_location& other) {
  return one.line() == other.line() && one.column() == other.column() &&
         (one.file_name() == other.file_name() || std::string_view(one.file_name()) == other.file_name());
}

// The fibers of a block, and where each of them is.
class Block {
 public:
  void drawFrom(uint64_t seed) { random_.seed(seed); }

  void run(unsigned threads, const std::function<void()>& thread) {
    begin(threads);
    thread_ = &thread;
    while (!ready_.empty()) {
      std::swap(ready_[random_() % ready_.size()], ready_.back());
      threadIdx.x = ready_.back();
      ready_.pop_back();
      fibers_[threadIdx.x].resume();
      if (!error_.empty()) throw std::logic_error(error_);
    }
    const auto stuck =
        std::find_if(places_.begin(), places_.end(), [](const auto& place) { return place.has_value(); });
    if (stuck != places_.end()) throw std::logic_error(describeStuck(static_cast<unsigned>(stuck - places_.begin())));
  }

  void meet(Group group, const std::source_location& where, void* mine, void (*exchange)(void**, unsigned)) {
    const unsigned thread = threadIdx.x;
    const unsigned first = group == Group::kBlock ? 0 : thread / kWarp * kWarp;
    const unsigned count = group == Group::kBlock ? size() : std::min(kWarp, size() - first);
    places_[thread] = where;
    mine_[thread] = mine;
    unsigned& arrived = group == Group::kBlock ? arrivedOfBlock_ : arrivedOfWarps_[thread / kWarp];
    if (++arrived < count) return Fiber::yield();
    for (unsigned other = first; other < first + count; ++other) {
      if (!isSame(*places_[other], where)) fail("another thread is elsewhere", where, other);
    }
    if (exchange != nullptr) exchange(&mine_[first], count);
    arrived = 0;
    for (unsigned other = first; other < first + count; ++other) {
      places_[other].reset();
      ready_.push_back(other);
    }
    Fiber::yield();
  }

  // Nothing that has to be freed is left on the thread's stack.
  [[noreturn]] void fail(const char* what, const std::source_location& where,
                         std::optional<unsigned> other = std::nullopt) {
    error_ = ofThread(threadIdx.x) + " is at " + toString(where) + ": " + what;
    if (other) error_ += ": thread " + std::to_string(*other) + " at " + toString(*places_[*other]);
    for (;;) Fiber::yield();
  }

 private:
  [[nodiscard]] unsigned size() const { return static_cast<unsigned>(places_.size()); }

  void begin(unsigned threads) {
    fillSharedMemory();
    while (fibers_.size() < threads) fibers_.emplace_back([this] { (*thread_)(); });
    places_.assign(threads, std::nullopt);
    mine_.assign(threads, nullptr);
    arrivedOfWarps_.assign((threads + kWarp - 1) / kWarp, 0);
    arrivedOfBlock_ = 0;
    ready_.resize(threads);
    std::iota(ready_.begin(), ready_.end(), 0U);
  }

  // Where one waits for ever, another has gone on, or waits elsewhere.
  [[nodiscard]] std::string describeStuck(unsigned thread) const {
    const auto& place = *places_[thread];
    for (unsigned other = 0; other < size(); ++other) {
      if (places_[other] && isSame(*places_[other], place)) continue;
      return ofThread(thread) + " waits at " + toString(place) + ", but thread " + std::to_string(other) +
             (places_[other] ? " waits at " + toString(*places_[other]) : " has left the kernel");
    }
    return ofThread(thread) + " waits at " + toString(place);
  }

  [[nodiscard]] static std::string ofThread(unsigned thread) {
    return "block " + std::to_string(blockIdx.x) + " of " + std::to_string(gridDim.x) + ", thread " +
           std::to_string(thread);
  }

  std::mt19937_64 random_;
  const std::function<void()>* thread_ = nullptr;
  std::vector<Fiber> fibers_;
  // Of threads that can go on, in any order.
  std::vector<unsigned> ready_;
  // Of each thread: where it waits, and what it has with it.
  std::vector<std::optional<std::source_location>> places_;
  std::vector<void*> mine_;
  std::vector<unsigned> arrivedOfWarps_;
  unsigned arrivedOfBlock_ = 0;
  std::string error_;
};

// Kept for the next grid, as its fibers have large stacks.
std::unique_ptr<Block> block;
uint64_t passed = 0;

}  // namespace

void setLastError(cudaError_t error) { lastError = error; }

Device& device() {
  static Device the;
  return the;
}

void runGrid(unsigned blocks, unsigned threads, const std::function<void()>& thread) {
  ++device().launches;
  gridDim.x = blocks;
  blockDim.x = threads;
  std::mt19937_64 random(device().seed++);
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0U);
  std::shuffle(order.begin(), order.end(), random);
  if (block == nullptr) block = std::make_unique<Block>();
  block->drawFrom(random());
  try {
    for (const unsigned index : order) {
      ++passed;
      blockIdx.x = index;
      block->run(threads, thread);
    }
  } catch (...) {
    // Its fibers are in the middle of something.
    block.reset();
    throw;
  }
}

void meet(Group group, const std::source_location& where, void* mine, void (*exchange)(void**, unsigned)) {
  block->meet(group, where, mine, exchange);
}

void barrier(const std::source_location& where) {
  meet(Group::kBlock, where, nullptr, [](void** /*all*/, unsigned /*count*/) { ++passed; });
}

uint64_t epoch() { return passed; }

void fail(const char* what, const std::source_location& where) { block->fail(what, where); }

}  // namespace cuda_on_cpu

cudaError_t cudaGetLastError() { return std::exchange(cuda_on_cpu::lastError, cudaSuccess); }
