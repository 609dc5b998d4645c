// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

// The kernel's virtio_net_hdr, whose header is not C++: it tells what a packet consists of.
struct VirtioHeader {
  uint8_t flags;
  uint8_t segmentation;  // 0: one segment
  uint16_t headerBytes;
  uint16_t segmentBytes;
  uint16_t checksumStart;
  uint16_t checksumOffset;
};
static_assert(sizeof(VirtioHeader) == 10);

// A packet as a TUN interface gives and takes it: a VirtioHeader, then IPv4. TCP sends many segments in one piece
// (TSO); on a real line each of them is a packet of its own.
class Packet {
 public:
  explicit Packet(std::vector<uint8_t> bytes);

  // Other packets have no segments.
  [[nodiscard]] bool isIpv4() const { return segments_ > 0; }
  // The index of the host that has the destination address.
  [[nodiscard]] size_t destination() const;
  [[nodiscard]] int64_t segments() const { return segments_; }
  // What a segment takes of a real line, where each has headers.
  [[nodiscard]] int64_t bytesOnTheLine(int64_t segment) const;
  // Returns `count` segments from `first` on as a packet of its own.
  [[nodiscard]] Packet part(int64_t first, int64_t count) const;
  [[nodiscard]] const std::vector<uint8_t>& bytes() const { return bytes_; }

 private:
  [[nodiscard]] int64_t payloadOf(int64_t segment) const;

  std::vector<uint8_t> bytes_;
  // Of IPv4 and of TCP; 0 where the packet is a single segment.
  int64_t ipBytes_ = 0;
  int64_t tcpBytes_ = 0;
  // Of every segment but the last.
  int64_t segmentBytes_ = 0;
  // Without headers where there are many segments.
  int64_t payload_ = 0;
  int64_t segments_ = 0;
};
