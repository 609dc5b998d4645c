// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "backend/os/unshared_file.h"

namespace bagua::net {

// An address and a port, IPv4 or IPv6.
class SocketAddress {
 public:
  SocketAddress() = default;
  SocketAddress(const sockaddr* address, socklen_t size);
  // "10.0.0.1" or "fd00::1". Throws ValueError for anything else.
  SocketAddress(const std::string& address, uint16_t port);

  [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  [[nodiscard]] socklen_t size() const { return size_; }
  [[nodiscard]] int family() const { return storage_.ss_family; }
  [[nodiscard]] std::string address() const;
  [[nodiscard]] uint16_t port() const;
  // "10.0.0.1 port 4711".
  [[nodiscard]] std::string text() const;

 private:
  sockaddr_storage storage_{};
  socklen_t size_ = 0;
};

SocketAddress addressOf(const UnsharedFile& socket);
// Returns the address at the other end, in words.
std::string peerOf(const UnsharedFile& socket);
// Starts to connect, without waiting. `error` is the system's where that fails at once; 0: it does not. Throws
// DistNetworkError where there are no more sockets.
UnsharedFile startConnecting(const SocketAddress& to, int& error);
// A link ends when the other host has given no sign for this long, so that one that has lost its power is known within
// half a minute. Without a limit that takes two hours, or for ever.
inline constexpr std::chrono::milliseconds kPatienceWithSilence{24'000};
// Returns whether an address is one of this host's, where no firewall is asked.
bool isOfThisHost(const SocketAddress& address);
// Prepares a connection: it does not wait for more to send, what is unsent stays in this process, and an idle one is
// probed. Probes keep the connection known to address translators and firewalls on the way, which forget it after a
// minute or more, and end it after kPatienceWithSilence without an answer.
void configure(const UnsharedFile& socket);
// Returns the pending error of a socket; 0: none.
int errorOf(const UnsharedFile& socket);
// Returns for how long the other host's kernel has sent nothing, though it has something to acknowledge; 0: it has not.
std::chrono::milliseconds unansweredFor(const UnsharedFile& socket);
// Returns whether the other host's kernel has acknowledged a byte.
bool hasTakenBytes(const UnsharedFile& socket);
// The kernel has seen this of the line that a connection goes over; zeros where it does not tell.
struct Line {
  // The shortest round trip of the last minutes, and that of late; 0 where nothing has been sent for two round trips.
  std::chrono::microseconds roundTrip{0};
  std::chrono::microseconds roundTripNow{0};
  // So many bytes may be under way.
  int64_t window = 0;
  // The rate at which bytes arrived at the other end: of late, or the best one while there was little to send.
  int64_t bytesPerSecond = 0;
  // Packets with data, and those of them that were sent again.
  uint64_t sent = 0;
  uint64_t lost = 0;
};
Line lineOf(const UnsharedFile& socket);
// The kernel keeps so much of a connection that it has not sent yet. This is little, so that urgent frames overtake,
// and connections share a message by how fast they are. With 128 KiB the thread that refills is woken twice as often.
inline constexpr int kMostUnsent = 256 << 10;
// The kernel takes no more while it has so many bytes that it has not sent yet.
void limitUnsent(const UnsharedFile& socket, int bytes);
// Has the kernel send by what it measures, whatever is lost (BBR). Returns false where it may not: see
// net.ipv4.tcp_allowed_congestion_control.
bool useBbr(const UnsharedFile& socket);

}  // namespace bagua::net
