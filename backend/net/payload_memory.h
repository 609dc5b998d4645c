// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "backend/net/frame.h"
#include "backend/os/shared_segment.h"

namespace bagua::net {

// Memory through which one process hands payload to another on the same host. Their connections then carry headers
// alone: a payload is copied twice, instead of going through TCP as well. It is cut into cells, each with room for the
// payload of a frame: so few that they stay in the caches. A change of its layout raises kWireFormat
// (backend/rendezvous/wire_format.h).
class PayloadMemory {
 public:
  // Makes the sender's end. Null where there is no shared memory to spare, or this process has made enough of it: 2 MiB
  // each, which data loaders want too.
  static std::shared_ptr<PayloadMemory> make();
  // Opens the receiver's end, by the sender's word; the memory has no name from then on. Null where it is none of ours,
  // or cannot be seen from here.
  static std::shared_ptr<PayloadMemory> open(const std::string& name);

  PayloadMemory(SharedSegment segment, bool isOwn) : segment_(std::move(segment)), isOwn_(isOwn) {}
  ~PayloadMemory();
  PayloadMemory(const PayloadMemory&) = delete;
  PayloadMemory& operator=(const PayloadMemory&) = delete;

  [[nodiscard]] const std::string& name() const { return segment_.name(); }
  [[nodiscard]] uint8_t* cell(uint32_t index) const;

  // --- The sender calls these, one thread at a time. The receiver has opened it.
  [[nodiscard]] bool isOpened() const;
  // Takes a free cell. Without one, the receiver's release() will say that somebody waits.
  std::optional<uint32_t> take();
  // Writes into a cell that was taken. The thread that takes it next comes after this one.
  void fill(uint32_t index, const uint8_t* payload, size_t bytes);

  // --- The receiver has read a cell. Returns true if the sender waits to be told, and enough cells are free.
  bool release(uint32_t index);

 private:
  // Both processes write to it: what one reads is the other's word.
  struct Header {
    std::atomic<uint32_t> isOpened;
    std::atomic<uint32_t> isAwaited;
    std::array<std::atomic<uint32_t>, kPayloadCells> isTaken;
  };
  static constexpr size_t kHeaderBytes = 4096;
  static constexpr size_t kBytes = kHeaderBytes + size_t{kPayloadCells} * kMostPayload;

  [[nodiscard]] Header& header() const { return *reinterpret_cast<Header*>(segment_.data()); }
  [[nodiscard]] std::optional<uint32_t> findFree();

  SharedSegment segment_;
  // Made by this process, as the sender.
  const bool isOwn_;
};

}  // namespace bagua::net
