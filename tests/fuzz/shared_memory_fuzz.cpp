// SPDX-License-Identifier: Apache-2.0
// Shared memory that a peer has filled: any seats and slots. An exchange ends with its deadline at the latest, and
// neither reads nor writes outside the segment and the tensor, whatever the seats say.
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <map>

#include "backend/cpu/shared_memory/shared_memory_exchange.h"
#include "tests/fuzz/fuzzed_bytes.h"

namespace bagua {
namespace {

using Clock = std::chrono::steady_clock;

// One for each number of ranks, for the whole run: to make one takes longer than to open it.
SharedSegment segmentOf(int ranks) {
  static std::map<int, SharedSegment> made;
  std::string whyNot;
  if (!made.contains(ranks)) {
    auto segment = SharedSegment::create(MeetingRoom::bytesFor(ranks), whyNot);
    TORCH_CHECK(segment.has_value(), whyNot);
    made.emplace(ranks, std::move(*segment));
  }
  auto opened = SharedSegment::open(made.at(ranks).name(), MeetingRoom::bytesFor(ranks), whyNot);
  TORCH_CHECK(opened.has_value(), whyNot);
  return std::move(*opened);
}

void fillSeats(fuzz::FuzzedBytes& input, const SharedSegment& segment, int ranks) {
  for (int rank = 0; rank < ranks; ++rank) {
    uint8_t* const seat = segment.data() + rank * MeetingRoom::bytesPerSeat();
    // The counters; rarely also what the rank says it has come for.
    input.fill(seat, 16);
    if (input.take<uint8_t>() % 8 == 0) input.fill(seat + 16, MeetingRoom::bytesPerSeat() - 16);
    // Mostly there: a peer that never comes only costs time.
    if (input.take<uint8_t>() % 8 != 0) {
      const uint32_t arrived = 1 + input.take<uint16_t>();
      const uint32_t hasGivenUp = 0;
      std::memcpy(seat, &arrived, sizeof(arrived));
      std::memcpy(seat + 2 * sizeof(uint32_t), &hasGivenUp, sizeof(hasGivenUp));
    }
  }
}

// Where an all-to-all says how much there is to come.
void fillSlots(fuzz::FuzzedBytes& input, const SharedSegment& segment, int ranks) {
  uint8_t* const slots = segment.data() + ranks * MeetingRoom::bytesPerSeat();
  input.fill(slots, 64);
  for (int slot = 0; slot < 2 * ranks; ++slot) {
    const int64_t largest = input.coin() ? input.claim() : 0;
    std::memcpy(slots + slot * MeetingRoom::kSlotBytes, &largest, sizeof(largest));
  }
}

void allToAll(fuzz::FuzzedBytes& input, SharedMemoryExchange& memory, SharedMemoryExchange::Deadline deadline) {
  std::vector<at::Tensor> sent;
  std::vector<at::Tensor> received;
  for (int peer = 0; peer < memory.size(); ++peer) {
    sent.push_back(at::zeros({input.from(0, 400'000)}, at::kByte));
    received.push_back(peer == memory.rank() ? sent.back().clone() : at::zeros({input.from(0, 400'000)}, at::kByte));
  }
  memory.allToAll(received, sent, deadline);
}

void gather(fuzz::FuzzedBytes& input, SharedMemoryExchange& memory, SharedMemoryExchange::Deadline deadline) {
  std::vector<SharedMemoryExchange::Span> spans;
  int64_t end = 0;
  for (int peer = 0; peer < memory.size(); ++peer) {
    spans.push_back({end, input.from(0, 200'000)});
    end += spans.back().length;
  }
  at::Tensor all = at::zeros({end}, at::kFloat);
  memory.gather(all, spans, deadline);
}

void exchange(fuzz::FuzzedBytes& input, SharedMemoryExchange& memory, int ranks) {
  const auto deadline = Clock::now() + std::chrono::milliseconds(input.from(0, 3));
  at::Tensor tensor = at::zeros({input.from(0, 100'000)}, at::kFloat);
  const c10d::ReduceOp sum = c10d::ReduceOp::SUM;
  const int root = static_cast<int>(input.from(0, ranks - 1));
  switch (input.take<uint8_t>() % 6) {
    case 0: {
      at::Tensor bytes = at::zeros({input.from(0, 2'000'000)}, at::kByte);
      return memory.broadcast(bytes, root, deadline);
    }
    case 1:
      return memory.allReduce(tensor, tensor.clone(), sum, deadline);
    case 2:
      return memory.reduce(tensor, tensor.clone(), root, sum, deadline);
    case 3:
      return allToAll(input, memory, deadline);
    case 4:
      return gather(input, memory, deadline);
    default:
      return memory.barrier(deadline);
  }
}

}  // namespace

void fuzzSharedMemory(fuzz::FuzzedBytes& input) {
  // Also as names of segments: a peer's word.
  std::string whyNot;
  const std::string name = input.text(64);
  if (SharedSegment::open(name, 4096, whyNot)) TORCH_INTERNAL_ASSERT(false, "opened '", name, "'");

  const int ranks = static_cast<int>(input.from(2, 4));
  SharedSegment segment = segmentOf(ranks);
  fillSeats(input, segment, ranks);
  fillSlots(input, segment, ranks);
  std::vector<std::string> names(ranks, "a rank");
  SharedMemoryExchange memory(
      std::make_unique<MeetingRoom>(std::move(segment), static_cast<int>(input.from(0, ranks - 1)), names));
  try {
    for (int64_t calls = input.from(1, 3); calls > 0; --calls) exchange(input, memory, ranks);
  } catch (const c10::DistNetworkError&) {
    // Somebody has not come, has given up, or is late.
    return;
  }
}

}  // namespace bagua

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer calls it so
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  bagua::fuzz::FuzzedBytes input(data, size);
  bagua::fuzzSharedMemory(input);
  return 0;
}
