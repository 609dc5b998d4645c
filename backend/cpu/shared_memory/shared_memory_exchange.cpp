// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/shared_memory/shared_memory_exchange.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

#include "backend/cpu/shared_memory/streaming_copy.h"
#include "backend/operation/tensor_bytes.h"

namespace bagua {
namespace {

constexpr int64_t kSlotBytes = MeetingRoom::kSlotBytes;
// Up to this size every rank reduces everything, which saves a meeting.
constexpr int64_t kOneStepBytes = int64_t{32} << 10;
// What all take at a time.
constexpr int64_t kPieceBytes = int64_t{512} << 10;
// What a rank reduces before it shows the result: then it is still in the first-level cache.
constexpr int64_t kBlockBytes = int64_t{8} << 10;
// Length of a name on its way, and of the flags.
constexpr int64_t kNameBytes = 64;

uint8_t* bytesAt(const at::Tensor& tensor) { return static_cast<uint8_t*>(tensor.mutable_data_ptr()); }
const uint8_t* constBytesAt(const at::Tensor& tensor) { return static_cast<const uint8_t*>(tensor.const_data_ptr()); }

// Calls visit(begin, length) for pieces of at most `most` of `total`.
template <typename Visit>
void inPieces(int64_t total, int64_t most, Visit&& visit) {
  for (int64_t begin = 0; begin < total; begin += most) visit(begin, std::min(most, total - begin));
}

// What every member says, in their order.
std::vector<std::string> tellAll(Wire& wire, const std::vector<int>& members, const std::string& text,
                                 SharedMemoryExchange::Deadline deadline) {
  at::Tensor sent = at::zeros({kNameBytes}, at::kByte);
  std::memcpy(bytesAt(sent), text.data(), std::min<size_t>(text.size(), kNameBytes - 1));
  std::vector<std::string> texts;
  for (const auto& heard : wire.tellEach(members, sent, deadline)) {
    // A peer's: it need not end with a zero.
    const auto* const begin = reinterpret_cast<const char*>(constBytesAt(heard));
    texts.emplace_back(begin, ::strnlen(begin, kNameBytes));
  }
  return texts;
}

// The first member makes the segment and tells its name; an empty name if it could not.
std::optional<SharedSegment> openTogether(Wire& wire, const std::vector<int>& members,
                                          SharedMemoryExchange::Deadline deadline, std::string& whyNot) {
  const size_t bytes = MeetingRoom::bytesFor(static_cast<int>(members.size()));
  if (wire.rank() == members.front()) {
    auto own = SharedSegment::create(bytes, whyNot);
    tellAll(wire, members, own ? own->name() : "", deadline);
    return own;
  }
  const std::string name = tellAll(wire, members, "", deadline)[0];
  if (name.empty()) {
    whyNot = "rank " + std::to_string(members.front()) + " could not make it";
    return std::nullopt;
  }
  return SharedSegment::open(name, bytes, whyNot);
}

}  // namespace

std::unique_ptr<SharedMemoryExchange> SharedMemoryExchange::make(Wire& wire, const std::vector<int>& members,
                                                                 Deadline deadline, std::string& whyNot) {
  auto segment = openTogether(wire, members, deadline, whyNot);
  const auto answers = tellAll(wire, members, segment ? "in" : "", deadline);
  if (std::ranges::find(answers, std::string()) != answers.end()) return nullptr;
  std::vector<std::string> names;
  for (const int member : members) names.push_back("rank " + std::to_string(member));
  const auto own = std::ranges::find(members, wire.rank()) - members.begin();
  auto room = std::make_unique<MeetingRoom>(std::move(*segment), static_cast<int>(own), std::move(names));
  // Seats are taken before anybody may look whether they are.
  tellAll(wire, members, "seated", deadline);
  room->removeName();
  return std::make_unique<SharedMemoryExchange>(std::move(room));
}

void SharedMemoryExchange::broadcast(at::Tensor& tensor, int root, Deadline deadline) {
  const bool isRoot = rank() == root;
  inPieces(tensor.numel(), kPieceBytes, [&](int64_t begin, int64_t length) {
    if (isRoot) show(room_->ownSlot(), constBytesAt(tensor) + begin, length);
    room_->meet(deadline);
    if (!isRoot) std::memcpy(bytesAt(tensor) + begin, room_->shown(root), length);
  });
}

void SharedMemoryExchange::gather(at::Tensor& tensor, const std::vector<Span>& spans, Deadline deadline) {
  int64_t longest = 0;
  for (const auto& span : spans) longest = std::max(longest, span.length);
  const int64_t item = itemSize(tensor);
  inPieces(longest, kPieceBytes / item, [&](int64_t begin, int64_t most) {
    const auto lengthOf = [&](int peer) { return std::clamp<int64_t>(spans[peer].length - begin, 0, most) * item; };
    const auto offsetOf = [&](int peer) { return (spans[peer].begin + begin) * item; };
    if (lengthOf(rank()) > 0) {
      show(room_->ownSlot(), constBytesAt(tensor) + offsetOf(rank()), lengthOf(rank()));
    }
    room_->meet(deadline);
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank() || lengthOf(peer) == 0) continue;
      std::memcpy(bytesAt(tensor) + offsetOf(peer), room_->shown(peer), lengthOf(peer));
    }
  });
}

// A slot holds a number, the largest message that its rank sends, and a part for each receiver. The largest of these
// numbers, known after the first meeting, tells all how many there will be.
void SharedMemoryExchange::allToAll(const std::vector<at::Tensor>& received, const std::vector<at::Tensor>& sent,
                                    Deadline deadline) {
  const int64_t partBytes = (kSlotBytes - kNameBytes) / size() / kNameBytes * kNameBytes;
  int64_t ownLargest = 0;
  for (const auto& part : sent) ownLargest = std::max(ownLargest, part.numel());
  const auto lengthAt = [&](const at::Tensor& part, int64_t begin) {
    return std::clamp<int64_t>(part.numel() - begin, 0, partBytes);
  };

  if (sent[rank()].numel() > 0)
    std::memcpy(bytesAt(received[rank()]), constBytesAt(sent[rank()]), sent[rank()].numel());
  int64_t largest = 0;
  int64_t begin = 0;
  do {
    uint8_t* const own = room_->ownSlot();
    std::memcpy(own, &ownLargest, sizeof(ownLargest));
    for (int peer = 0; peer < size(); ++peer) {
      const int64_t length = lengthAt(sent[peer], begin);
      if (peer != rank() && length > 0) {
        show(own + kNameBytes + peer * partBytes, constBytesAt(sent[peer]) + begin, length);
      }
    }
    room_->meet(deadline);
    for (int peer = 0; peer < size(); ++peer) {
      int64_t peerLargest = 0;
      std::memcpy(&peerLargest, room_->shown(peer), sizeof(peerLargest));
      largest = std::max(largest, peerLargest);
      const int64_t length = lengthAt(received[peer], begin);
      if (peer != rank() && length > 0) {
        std::memcpy(bytesAt(received[peer]) + begin, room_->shown(peer) + kNameBytes + rank() * partBytes, length);
      }
    }
    begin += partBytes;
  } while (begin < largest);
}

void SharedMemoryExchange::show(uint8_t* to, const void* from, int64_t bytes) const {
  if (room_->isCrowded()) {
    std::memcpy(to, from, bytes);
  } else {
    streamingCopy(to, static_cast<const uint8_t*>(from), bytes);
  }
}

std::vector<const void*> SharedMemoryExchange::contributions(const void* own, int64_t offset) const {
  std::vector<const void*> parts;
  parts.reserve(size());
  for (int peer = 0; peer < size(); ++peer) {
    parts.push_back(peer == rank() ? own : static_cast<const void*>(room_->shown(peer) + offset));
  }
  return parts;
}

void SharedMemoryExchange::allReduce(at::Tensor& flat, const at::Tensor& prepared, const c10d::ReduceOp& op,
                                     Deadline deadline) {
  const int64_t item = itemSize(flat);
  uint8_t* const all = bytesAt(flat);
  const uint8_t* const own = constBytesAt(prepared);
  inPieces(flat.numel(), kPieceBytes / item, [&](int64_t begin, int64_t length) {
    const Elements piece{flat.scalar_type(), length, all + begin * item};
    // With two ranks as many bytes go from one core to the other either way: 64 MiB took 8.2 ms in one step, 15.8 in
    // two.
    if (size() == 2 || length * item <= kOneStepBytes) {
      allReduceInOneStep(piece, own + begin * item, op, deadline);
    } else {
      allReduceInTwoSteps(piece, own + begin * item, op, deadline);
    }
  });
}

void SharedMemoryExchange::allReduceInOneStep(const Elements& piece, const uint8_t* prepared, const c10d::ReduceOp& op,
                                              Deadline deadline) {
  show(room_->ownSlot(), prepared, piece.bytes());
  room_->meet(deadline);
  reduction::reduceParts(contributions(prepared, 0), op, size(), piece);
}

// Every rank shows the others their spans, reduces its own, and shows the result.
void SharedMemoryExchange::allReduceInTwoSteps(const Elements& piece, const uint8_t* prepared, const c10d::ReduceOp& op,
                                               Deadline deadline) {
  const int64_t item = piece.itemSize();
  const int64_t stride = (piece.numel + size() - 1) / size();
  const auto beginOf = [&](int peer) { return std::min(peer * stride, piece.numel); };
  const auto lengthOf = [&](int peer) { return beginOf(peer + 1) - beginOf(peer); };

  uint8_t* const shown = room_->ownSlot();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    show(shown + beginOf(peer) * item, prepared + beginOf(peer) * item, lengthOf(peer) * item);
  }
  room_->meet(deadline);
  uint8_t* const result = room_->ownSlot();
  const Elements own = piece.part(beginOf(rank()), lengthOf(rank()));
  inPieces(own.numel, kBlockBytes / item, [&](int64_t begin, int64_t length) {
    const Elements block = own.part(begin, length);
    const int64_t offset = (beginOf(rank()) + begin) * item;
    reduction::reduceParts(contributions(prepared + offset, offset), op, size(), block);
    show(result + begin * item, block.data, block.bytes());
  });
  room_->meet(deadline);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    const Elements theirs = piece.part(beginOf(peer), lengthOf(peer));
    std::memcpy(theirs.data, room_->shown(peer), theirs.bytes());
  }
}

void SharedMemoryExchange::reduce(at::Tensor& flat, const at::Tensor& prepared, int root, const c10d::ReduceOp& op,
                                  Deadline deadline) {
  const int64_t item = itemSize(flat);
  const auto all = reduction::elementsOf(flat);
  inPieces(flat.numel(), kPieceBytes / item, [&](int64_t begin, int64_t length) {
    const uint8_t* const own = constBytesAt(prepared) + begin * item;
    if (rank() != root) show(room_->ownSlot(), own, length * item);
    room_->meet(deadline);
    if (rank() == root) reduction::reduceParts(contributions(own, 0), op, size(), all.part(begin, length));
  });
}

void SharedMemoryExchange::reduceSpans(at::Tensor& output, const at::Tensor& prepared, const std::vector<Span>& spans,
                                       const c10d::ReduceOp& op, int64_t contributors, Deadline deadline) {
  const int64_t item = itemSize(output);
  const auto result = reduction::elementsOf(output);
  int64_t longest = 0;
  for (const auto& span : spans) longest = std::max(longest, span.length);
  const int64_t stride = kPieceBytes / size() / item;
  inPieces(longest, stride, [&](int64_t begin, int64_t most) {
    const auto lengthOf = [&](int peer) { return std::clamp<int64_t>(spans[peer].length - begin, 0, most); };
    const auto contributionTo = [&](int peer) { return constBytesAt(prepared) + (spans[peer].begin + begin) * item; };
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank() || lengthOf(peer) == 0) continue;
      show(room_->ownSlot() + peer * stride * item, contributionTo(peer), lengthOf(peer) * item);
    }
    room_->meet(deadline);
    if (lengthOf(rank()) == 0) return;
    reduction::reduceParts(contributions(contributionTo(rank()), rank() * stride * item), op, contributors,
                           result.part(begin, lengthOf(rank())));
  });
}

}  // namespace bagua
