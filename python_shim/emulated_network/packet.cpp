// SPDX-License-Identifier: Apache-2.0
#include "packet.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

namespace {

// Of Ethernet, for every segment.
constexpr int64_t kLinkHeaderBytes = 14;
constexpr size_t kIp = sizeof(VirtioHeader);
constexpr int64_t kShortestIpHeader = 20;
constexpr int64_t kShortestTcpHeader = 20;
// Values of VirtioHeader::segmentation.
constexpr uint8_t kTcpOverIpv4 = 1;
constexpr uint8_t kReducedWindow = 0x80;  // ECN: the first segment alone has TCP's flag CWR
// Flags of TCP.
constexpr uint8_t kCwr = 0x80;
constexpr uint8_t kOnlyInTheLast = 0x09;  // FIN and PSH

uint32_t bigEndian16(const uint8_t* place) { return static_cast<uint32_t>(place[0]) << 8U | place[1]; }

void putBigEndian16(uint8_t* place, uint32_t value) {
  place[0] = static_cast<uint8_t>(value >> 8U);
  place[1] = static_cast<uint8_t>(value);
}

uint32_t folded(uint32_t sum) {
  while (sum >> 16U) sum = (sum & 0xFFFFU) + (sum >> 16U);
  return sum;
}

uint32_t sumOf(const uint8_t* begin, int64_t bytes) {
  uint32_t sum = 0;
  for (int64_t i = 0; i < bytes; i += 2) sum += bigEndian16(begin + i);
  return sum;
}

}  // namespace

Packet::Packet(std::vector<uint8_t> bytes) : bytes_(std::move(bytes)) {
  const auto size = static_cast<int64_t>(bytes_.size()) - static_cast<int64_t>(kIp);
  if (size < kShortestIpHeader || bytes_[kIp] >> 4U != 4) return;
  VirtioHeader header{};
  std::memcpy(&header, bytes_.data(), sizeof(header));
  payload_ = segmentBytes_ = size;
  segments_ = 1;
  if ((header.segmentation & ~kReducedWindow) != kTcpOverIpv4 || header.segmentBytes == 0) return;
  const int64_t ipBytes = int64_t{4} * (bytes_[kIp] & 0xFU);
  if (ipBytes + kShortestTcpHeader > size) return;
  const int64_t tcpBytes = int64_t{4} * (bytes_[kIp + ipBytes + 12] >> 4U);
  if (ipBytes + tcpBytes >= size) return;
  ipBytes_ = ipBytes;
  tcpBytes_ = tcpBytes;
  segmentBytes_ = header.segmentBytes;
  payload_ = size - ipBytes - tcpBytes;
  segments_ = (payload_ + segmentBytes_ - 1) / segmentBytes_;
}

size_t Packet::destination() const { return bytes_[kIp + 19] - size_t{1}; }

int64_t Packet::payloadOf(int64_t segment) const { return std::min(segmentBytes_, payload_ - segment * segmentBytes_); }

int64_t Packet::bytesOnTheLine(int64_t segment) const {
  return ipBytes_ + tcpBytes_ + payloadOf(segment) + kLinkHeaderBytes;
}

Packet Packet::part(int64_t first, int64_t count) const {
  const int64_t begin = first * segmentBytes_;
  const int64_t length = std::min(count * segmentBytes_, payload_ - begin);
  const int64_t headers = ipBytes_ + tcpBytes_;
  const auto payload = bytes_.begin() + static_cast<int64_t>(kIp) + headers + begin;
  std::vector<uint8_t> bytes(bytes_.begin(), bytes_.begin() + static_cast<int64_t>(kIp) + headers);
  bytes.insert(bytes.end(), payload, payload + length);

  VirtioHeader header{};
  std::memcpy(&header, bytes.data(), sizeof(header));
  header.headerBytes = static_cast<uint16_t>(headers);
  if (count == 1) {
    header.segmentation = 0;
    header.segmentBytes = 0;
  } else if (first > 0) {
    header.segmentation &= static_cast<uint8_t>(~kReducedWindow);
  }
  std::memcpy(bytes.data(), &header, sizeof(header));

  uint8_t* const ip = bytes.data() + kIp;
  putBigEndian16(ip + 2, static_cast<uint32_t>(headers + length));
  putBigEndian16(ip + 4, bigEndian16(ip + 4) + static_cast<uint32_t>(first));
  putBigEndian16(ip + 10, 0);
  putBigEndian16(ip + 10, ~folded(sumOf(ip, ipBytes_)));

  uint8_t* const tcp = ip + ipBytes_;
  const uint32_t sequence = (bigEndian16(tcp + 4) << 16U | bigEndian16(tcp + 6)) + static_cast<uint32_t>(begin);
  putBigEndian16(tcp + 4, sequence >> 16U);
  putBigEndian16(tcp + 6, sequence);
  if (first > 0) tcp[13] &= static_cast<uint8_t>(~kCwr);
  if (first + count < segments_) tcp[13] &= static_cast<uint8_t>(~kOnlyInTheLast);
  // As TCP leaves it to an interface that computes checksums: the sum of addresses, protocol and length.
  constexpr uint32_t kTcp = 6;
  putBigEndian16(tcp + 16, folded(sumOf(ip + 12, 8) + kTcp + static_cast<uint32_t>(tcpBytes_ + length)));
  return Packet(std::move(bytes));
}
