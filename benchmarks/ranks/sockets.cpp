// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/ranks/sockets.h"

#include <arpa/inet.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

namespace bagua::ranks {
namespace {

std::optional<uint16_t> portOf(int socket, int (*nameOf)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (nameOf(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) return std::nullopt;
  if (address.ss_family == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
  if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  return std::nullopt;
}

void count(int socket, SocketCounts& counts) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return;
  ++counts.connections;
  counts.segments += info.tcpi_data_segs_out;
  counts.bytes += static_cast<int64_t>(info.tcpi_bytes_sent);
}

}  // namespace

ProcessCounts countSockets(uint16_t storePort) {
  ProcessCounts counts;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int number = std::stoi(entry.path().filename());
    const auto peer = portOf(number, &getpeername);
    const auto own = portOf(number, &getsockname);
    if (!peer || !own || *own == storePort) continue;
    count(number, *peer == storePort ? counts.store : counts.peers);
  }
  return counts;
}

int64_t privateMemory() {
  std::ifstream lines("/proc/self/smaps_rollup");
  int64_t kibibytes = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("Private_Dirty:")) kibibytes += std::stoll(line.substr(line.find(':') + 1));
  }
  return kibibytes << 10;
}

}  // namespace bagua::ranks
