// SPDX-License-Identifier: Apache-2.0
#include "backend/host/shared_memory/shared_memory_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "backend/host/reduction.h"

namespace bagua {
namespace {

constexpr int64_t kSlotBytes = MeetingRoom::kSlotBytes;
// Up to this size every rank reduces everything, which saves a meeting.
constexpr int64_t kOneStepBytes = int64_t{64} << 10;
// Length of a name on its way, and of the flags.
constexpr int64_t kNameBytes = 64;

uint8_t* bytesAt(const at::Tensor& tensor) { return static_cast<uint8_t*>(tensor.mutable_data_ptr()); }
const uint8_t* constBytesAt(const at::Tensor& tensor) { return static_cast<const uint8_t*>(tensor.const_data_ptr()); }

int64_t itemSize(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.element_size()); }

// Calls visit(begin, length) for pieces of at most `most` of `total`.
template <typename Visit>
void inPieces(int64_t total, int64_t most, Visit&& visit) {
  for (int64_t begin = 0; begin < total; begin += most) visit(begin, std::min(most, total - begin));
}

std::vector<std::string> namesOf(const Communicator& network) {
  std::vector<std::string> names;
  for (int rank = 0; rank < network.size(); ++rank) names.push_back("rank " + std::to_string(rank));
  return names;
}

// What every rank says, in rank order. Every rank hears every other directly: where one has died, all find out.
std::vector<std::string> tellAll(Communicator& network, const std::string& text) {
  const int size = network.size();
  at::Tensor sent = at::zeros({size, kNameBytes}, at::kByte);
  for (int peer = 0; peer < size; ++peer) {
    std::memcpy(bytesAt(sent) + peer * kNameBytes, text.data(), std::min<size_t>(text.size(), kNameBytes - 1));
  }
  at::Tensor received = at::empty_like(sent);
  const SharedMemoryExchange::Splits splits(size, kNameBytes);
  network.allToAll(received, sent, splits, splits);
  std::vector<std::string> texts;
  for (int peer = 0; peer < size; ++peer) {
    // A peer's: it need not end with a zero.
    const auto* const begin = reinterpret_cast<const char*>(constBytesAt(received) + peer * kNameBytes);
    texts.emplace_back(begin, ::strnlen(begin, kNameBytes));
  }
  return texts;
}

// Rank 0 makes the segment and tells its name; an empty name if it could not.
std::optional<SharedSegment> openTogether(Communicator& network, std::string& whyNot) {
  const size_t bytes = MeetingRoom::bytesFor(network.size());
  if (network.rank() == 0) {
    auto own = SharedSegment::create(bytes, whyNot);
    tellAll(network, own ? own->name() : "");
    return own;
  }
  const std::string name = tellAll(network, "")[0];
  if (name.empty()) {
    whyNot = "rank 0 could not make it";
    return std::nullopt;
  }
  return SharedSegment::open(name, bytes, whyNot);
}

}  // namespace

std::unique_ptr<SharedMemoryExchange> SharedMemoryExchange::make(Communicator& network, Deadline deadline) {
  network.setDeadline(deadline);
  std::string whyNot;
  auto segment = openTogether(network, whyNot);
  const auto answers = tellAll(network, segment ? "in" : "");
  if (std::find(answers.begin(), answers.end(), "") != answers.end()) {
    LOG(WARNING) << "bagua: rank " << network.rank() << " exchanges CPU tensors through the network although all ranks "
                 << "share a host, because there is no shared memory for them"
                 << (whyNot.empty() ? "" : " (" + whyNot + ")") << ": is /dev/shm too small?";
    return nullptr;
  }
  auto room = std::make_unique<MeetingRoom>(std::move(*segment), network.rank(), namesOf(network));
  // Seats are taken before anybody may look whether they are.
  tellAll(network, "seated");
  room->removeName();
  return std::make_unique<SharedMemoryExchange>(std::move(room));
}

void SharedMemoryExchange::broadcast(at::Tensor& tensor, int root, Deadline deadline) {
  const bool isRoot = room_->rank() == root;
  inPieces(tensor.numel(), kSlotBytes, [&](int64_t begin, int64_t length) {
    if (isRoot) std::memcpy(room_->ownSlot(), constBytesAt(tensor) + begin, length);
    room_->meet(deadline);
    if (!isRoot) std::memcpy(bytesAt(tensor) + begin, room_->shown(root), length);
  });
}

void SharedMemoryExchange::allGather(at::Tensor& output, const at::Tensor& input, Deadline deadline) {
  const int64_t bytes = input.numel();
  std::memcpy(bytesAt(output) + room_->rank() * bytes, constBytesAt(input), bytes);
  inPieces(bytes, kSlotBytes, [&](int64_t begin, int64_t length) {
    std::memcpy(room_->ownSlot(), constBytesAt(input) + begin, length);
    room_->meet(deadline);
    for (int peer = 0; peer < room_->size(); ++peer) {
      if (peer != room_->rank()) std::memcpy(bytesAt(output) + peer * bytes + begin, room_->shown(peer), length);
    }
  });
}

// A slot holds a number, the largest message that its rank sends, and a part for each receiver. The largest of these
// numbers, known after the first meeting, tells all how many there will be.
void SharedMemoryExchange::allToAll(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                                    const Splits& inputSplits, Deadline deadline) {
  const int size = room_->size();
  const int rank = room_->rank();
  const Splits sent = inputSplits.empty() ? Splits(size, input.numel() / size) : inputSplits;
  const Splits expected = outputSplits.empty() ? Splits(size, output.numel() / size) : outputSplits;
  Splits from(size, 0);
  Splits to(size, 0);
  std::exclusive_scan(sent.begin(), sent.end(), from.begin(), int64_t{0});
  std::exclusive_scan(expected.begin(), expected.end(), to.begin(), int64_t{0});
  const int64_t partBytes = (kSlotBytes - kNameBytes) / size / kNameBytes * kNameBytes;
  const int64_t ownLargest = *std::max_element(sent.begin(), sent.end());

  std::memcpy(bytesAt(output) + to[rank], constBytesAt(input) + from[rank], sent[rank]);
  int64_t largest = 0;
  int64_t begin = 0;
  do {
    uint8_t* const own = room_->ownSlot();
    std::memcpy(own, &ownLargest, sizeof(ownLargest));
    for (int peer = 0; peer < size; ++peer) {
      const int64_t length = std::clamp<int64_t>(sent[peer] - begin, 0, partBytes);
      if (peer != rank && length > 0) {
        std::memcpy(own + kNameBytes + peer * partBytes, constBytesAt(input) + from[peer] + begin, length);
      }
    }
    room_->meet(deadline);
    for (int peer = 0; peer < size; ++peer) {
      int64_t peerLargest = 0;
      std::memcpy(&peerLargest, room_->shown(peer), sizeof(peerLargest));
      largest = std::max(largest, peerLargest);
      const int64_t length = std::clamp<int64_t>(expected[peer] - begin, 0, partBytes);
      if (peer != rank && length > 0) {
        std::memcpy(bytesAt(output) + to[peer] + begin, room_->shown(peer) + kNameBytes + rank * partBytes, length);
      }
    }
    begin += partBytes;
  } while (begin < largest);
}

void SharedMemoryExchange::reduceShown(const at::Tensor& output, int64_t begin, const c10d::ReduceOp& op) const {
  std::vector<const void*> parts;
  parts.reserve(room_->size());
  for (int peer = 0; peer < room_->size(); ++peer) parts.push_back(room_->shown(peer) + begin * itemSize(output));
  reduction::reduceParts(parts, op, output);
}

void SharedMemoryExchange::allReduce(at::Tensor& flat, const at::Tensor& prepared, const c10d::ReduceOp& op,
                                     Deadline deadline) {
  const int64_t most = kSlotBytes / itemSize(flat);
  inPieces(flat.numel(), most, [&](int64_t begin, int64_t length) {
    at::Tensor piece = flat.narrow(0, begin, length);
    const int64_t bytes = length * itemSize(flat);
    std::memcpy(room_->ownSlot(), constBytesAt(prepared) + begin * itemSize(flat), bytes);
    room_->meet(deadline);
    // With two ranks each reads one other copy either way.
    if (room_->size() == 2 || bytes <= kOneStepBytes) {
      reduceShown(piece, 0, op);
    } else {
      allReduceInTwoSteps(piece, op, deadline);
    }
  });
}

// Each rank reduces a part of what is shown, into its next slot, and then collects all parts.
void SharedMemoryExchange::allReduceInTwoSteps(at::Tensor& piece, const c10d::ReduceOp& op, Deadline deadline) {
  const int64_t partLength = (piece.numel() + room_->size() - 1) / room_->size();
  const auto beginOf = [&](int rank) { return std::min(rank * partLength, piece.numel()); };
  const int64_t ownBegin = beginOf(room_->rank());
  const int64_t ownLength = beginOf(room_->rank() + 1) - ownBegin;
  const at::Tensor own = at::from_blob(room_->ownSlot(), {ownLength}, piece.options());
  if (ownLength > 0) reduceShown(own, ownBegin, op);
  room_->meet(deadline);
  for (int peer = 0; peer < room_->size(); ++peer) {
    const int64_t begin = beginOf(peer);
    std::memcpy(bytesAt(piece) + begin * itemSize(piece), room_->shown(peer),
                (beginOf(peer + 1) - begin) * itemSize(piece));
  }
}

void SharedMemoryExchange::reduce(at::Tensor& flat, const at::Tensor& prepared, int root, const c10d::ReduceOp& op,
                                  Deadline deadline) {
  inPieces(flat.numel(), kSlotBytes / itemSize(flat), [&](int64_t begin, int64_t length) {
    std::memcpy(room_->ownSlot(), constBytesAt(prepared) + begin * itemSize(flat), length * itemSize(flat));
    room_->meet(deadline);
    if (room_->rank() == root) reduceShown(flat.narrow(0, begin, length), 0, op);
  });
}

void SharedMemoryExchange::reduceScatter(at::Tensor& output, const at::Tensor& prepared, const c10d::ReduceOp& op,
                                         Deadline deadline) {
  const int64_t partNumel = output.numel();
  const int64_t most = kSlotBytes / room_->size() / itemSize(output);
  inPieces(partNumel, most, [&](int64_t begin, int64_t length) {
    const int64_t bytes = length * itemSize(output);
    for (int peer = 0; peer < room_->size(); ++peer) {
      std::memcpy(room_->ownSlot() + peer * bytes,
                  constBytesAt(prepared) + (peer * partNumel + begin) * itemSize(output), bytes);
    }
    room_->meet(deadline);
    reduceShown(output.narrow(0, begin, length), room_->rank() * length, op);
  });
}

}  // namespace bagua
