// SPDX-License-Identifier: Apache-2.0
#include "backend/net/payload_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace bagua::net {
namespace {

constexpr int kMostOfProcess = 16;
std::atomic<int> countOfProcess = 0;

}  // namespace

std::shared_ptr<PayloadMemory> PayloadMemory::make() {
  static_assert(sizeof(Header) <= kHeaderBytes);
  if (countOfProcess >= kMostOfProcess) return nullptr;
  std::string whyNot;
  auto segment = SharedSegment::create(kBytes, whyNot);
  if (!segment) return nullptr;
  ++countOfProcess;
  return std::make_shared<PayloadMemory>(std::move(*segment), true);
}

PayloadMemory::~PayloadMemory() {
  if (isOwn_) --countOfProcess;
}

std::shared_ptr<PayloadMemory> PayloadMemory::open(const std::string& name) {
  std::string whyNot;
  auto segment = SharedSegment::open(name, kBytes, whyNot);
  if (!segment) return nullptr;
  // Here, as the sender may not look again for long.
  segment->removeOnlyHeardName();
  auto memory = std::make_shared<PayloadMemory>(std::move(*segment), false);
  memory->header().isOpened.store(1, std::memory_order_release);
  return memory;
}

uint8_t* PayloadMemory::cell(uint32_t index) const {
  return segment_.data() + kHeaderBytes + size_t{index} * kMostPayload;
}

bool PayloadMemory::isOpened() const { return header().isOpened.load(std::memory_order_acquire) != 0; }

std::optional<uint32_t> PayloadMemory::findFree() {
  for (uint32_t index = 0; index < kPayloadCells; ++index) {
    // Only the sender takes one.
    if (header().isTaken[index].load() != 0) continue;
    header().isTaken[index].store(1);
    return index;
  }
  return std::nullopt;
}

// Each side writes first and then looks at what the other has written, in one order of all: at least one of them sees
// that a cell is free and that somebody waits for it.
std::optional<uint32_t> PayloadMemory::take() {
  if (const auto index = findFree()) return index;
  header().isAwaited.store(1);
  return findFree();
}

void PayloadMemory::fill(uint32_t index, const uint8_t* payload, size_t bytes) {
  std::memcpy(cell(index), payload, bytes);
  // Nobody releases it before its frame has gone. findFree() of another thread then sees all that was written.
  header().isTaken[index].store(1);
}

bool PayloadMemory::release(uint32_t index) {
  header().isTaken[index].store(0);
  if (header().isAwaited.load() == 0) return false;
  // Those that are taken will all be released, so that half of them are free some time.
  const auto isFree = [](const auto& isTaken) { return isTaken.load() == 0; };
  const auto free = std::count_if(header().isTaken.begin(), header().isTaken.end(), isFree);
  return free >= kPayloadCells / 2 && header().isAwaited.exchange(0) != 0;
}

}  // namespace bagua::net
