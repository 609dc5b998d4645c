// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "backend/net/listener.h"
#include "backend/net/socket.h"

namespace bagua::net {

// Returns those of this process that are connected over IPv4, and for which isChosen(own port, peer's port).
template <class IsChosen>
std::vector<int> connectedSockets(const IsChosen& isChosen) {
  std::vector<int> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int number = std::stoi(entry.path().filename());
    sockaddr_in own{};
    sockaddr_in peer{};
    socklen_t size = sizeof(own);
    if (getsockname(number, reinterpret_cast<sockaddr*>(&own), &size) != 0 || own.sin_family != AF_INET) continue;
    size = sizeof(peer);
    if (getpeername(number, reinterpret_cast<sockaddr*>(&peer), &size) != 0) continue;
    if (isChosen(ntohs(own.sin_port), ntohs(peer.sin_port))) found.push_back(number);
  }
  return found;
}

inline int listenerAt(uint16_t port) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int number = std::stoi(entry.path().filename());
    int listens = 0;
    socklen_t size = sizeof(listens);
    if (getsockopt(number, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0) continue;
    sockaddr_in own{};
    size = sizeof(own);
    if (getsockname(number, reinterpret_cast<sockaddr*>(&own), &size) == 0 && ntohs(own.sin_port) == port) {
      return number;
    }
  }
  return -1;
}

// Returns two ports side by side that nobody uses, and that the kernel gives to nobody who does not name them.
// Processes begin to look at different ones: tests that run at the same time would take each other's.
inline config::PortRange freePorts() {
  constexpr int kPairs = 4'500;
  for (int i = 0; i < kPairs; ++i) {
    try {
      const auto port = static_cast<uint16_t>(23'000 + 2 * ((getpid() + i) % kPairs));
      const config::PortRange range{.first = port, .last = static_cast<uint16_t>(port + 1)};
      listenAt("127.0.0.1", {range.first, range.first});
      listenAt("127.0.0.1", {range.last, range.last});
      return range;
    } catch (const c10::DistNetworkError&) {
      continue;
    }
  }
  throw std::runtime_error("no free ports");
}

// The kernel drops what arrives at this socket.
inline void deafen(int socket) {
  sock_filter drop{BPF_RET | BPF_K, 0, 0, 0};
  const sock_fprog all{1, &drop};
  ASSERT_EQ(setsockopt(socket, SOL_SOCKET, SO_ATTACH_FILTER, &all, sizeof(all)), 0);
}

// Resets a connection as the network does: both ends find it broken, and what is on its way is lost.
inline void reset(const UnsharedFile& socket) {
  // A socket that is connected to nobody is disconnected, with a reset to the other end. A thread may be in it.
  const sockaddr nobody{.sa_family = AF_UNSPEC, .sa_data = {}};
  while (connect(socket.number(), &nobody, sizeof(nobody)) != 0 && errno == EBUSY) usleep(100);
  shutdown(socket.number(), SHUT_RDWR);
}

// Resets the chosen connections of this process. Returns how many they were.
template <class IsChosen>
int resetConnections(const IsChosen& isChosen) {
  int count = 0;
  for (const int number : connectedSockets(isChosen)) {
    // A descriptor of its own, which the owner of the other cannot close in between. ThreadSanitizer would take dup()
    // itself for a race with that owner.
    const UnsharedFile socket(static_cast<int>(syscall(SYS_dup, number)));
    sockaddr_in peer{};
    socklen_t size = sizeof(peer);
    if (!socket.isOpen() || getpeername(socket.number(), reinterpret_cast<sockaddr*>(&peer), &size) != 0) continue;
    reset(socket);
    ++count;
  }
  return count;
}

}  // namespace bagua::net
