// SPDX-License-Identifier: Apache-2.0
#include "backend/net/socket.h"

#include <arpa/inet.h>
#include <c10/util/Exception.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <limits>
#include <string_view>
#include <system_error>

namespace bagua::net {
namespace {

std::string textOf(int error) { return std::generic_category().message(error); }

// The kernel counts from the last sign of life. A line may be cut just before the first probe, so that comes early.
constexpr int kSecondsBeforeProbe = 3;
constexpr int kSecondsBetweenProbes = 3;
constexpr int kProbes = 7;
static_assert(std::chrono::seconds(kSecondsBeforeProbe + kProbes * kSecondsBetweenProbes) == kPatienceWithSilence);

void set(const UnsharedFile& socket, int level, int option, int value) {
  // The connection works without it too.
  setsockopt(socket.number(), level, option, &value, sizeof(value));
}

}  // namespace

SocketAddress::SocketAddress(const sockaddr* address, socklen_t size) : size_(size) {
  TORCH_INTERNAL_ASSERT(size <= sizeof(storage_));
  std::memcpy(&storage_, address, size);
}

SocketAddress::SocketAddress(const std::string& address, uint16_t port) {
  in_addr four{};
  in6_addr six{};
  if (inet_pton(AF_INET, address.c_str(), &four) == 1) {
    sockaddr_in whole{};
    whole.sin_family = AF_INET;
    whole.sin_port = htons(port);
    whole.sin_addr = four;
    std::memcpy(&storage_, &whole, size_ = sizeof(whole));
    return;
  }
  TORCH_CHECK_VALUE(inet_pton(AF_INET6, address.c_str(), &six) == 1, "bagua: '", address, "' is not an IP address");
  sockaddr_in6 whole{};
  whole.sin6_family = AF_INET6;
  whole.sin6_port = htons(port);
  whole.sin6_addr = six;
  std::memcpy(&storage_, &whole, size_ = sizeof(whole));
}

std::string SocketAddress::address() const {
  char text[INET6_ADDRSTRLEN] = {};
  if (family() == AF_INET) {
    sockaddr_in whole{};
    std::memcpy(&whole, &storage_, sizeof(whole));
    inet_ntop(AF_INET, &whole.sin_addr, text, sizeof(text));
  } else {
    sockaddr_in6 whole{};
    std::memcpy(&whole, &storage_, sizeof(whole));
    inet_ntop(AF_INET6, &whole.sin6_addr, text, sizeof(text));
  }
  return text;
}

uint16_t SocketAddress::port() const {
  // The port is at the same place in both.
  static_assert(offsetof(sockaddr_in, sin_port) == offsetof(sockaddr_in6, sin6_port));
  in_port_t port = 0;
  std::memcpy(&port, reinterpret_cast<const char*>(&storage_) + offsetof(sockaddr_in, sin_port), sizeof(port));
  return ntohs(port);
}

std::string SocketAddress::text() const {
  return size_ == 0 ? "an address that is not known" : address() + " port " + std::to_string(port());
}

SocketAddress addressOf(const UnsharedFile& socket) {
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);
  const bool isKnown = getsockname(socket.number(), reinterpret_cast<sockaddr*>(&storage), &size) == 0;
  TORCH_CHECK_WITH(DistNetworkError, isKnown, "bagua: a socket has no address: ", textOf(errno));
  return {reinterpret_cast<sockaddr*>(&storage), size};
}

std::string peerOf(const UnsharedFile& socket) {
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);
  if (getpeername(socket.number(), reinterpret_cast<sockaddr*>(&storage), &size) != 0) return "somewhere";
  return SocketAddress(reinterpret_cast<sockaddr*>(&storage), size).address();
}

UnsharedFile startConnecting(const SocketAddress& to, int& error) {
  UnsharedFile socket(::socket(to.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  TORCH_CHECK_WITH(DistNetworkError, socket.isOpen(), "bagua: cannot open a socket: ", textOf(errno));
  configure(socket);
  error = connect(socket.number(), to.get(), to.size()) == 0 || errno == EINPROGRESS ? 0 : errno;
  return socket;
}

bool isOfThisHost(const SocketAddress& address) {
  const SocketAddress anyPort(address.address(), 0);
  const UnsharedFile socket(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  return bind(socket.number(), anyPort.get(), anyPort.size()) == 0;
}

void configure(const UnsharedFile& socket) {
  set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  limitUnsent(socket, kMostUnsent);
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, kSecondsBeforeProbe);
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, kSecondsBetweenProbes);
  set(socket, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
}

int errorOf(const UnsharedFile& socket) {
  int error = 0;
  socklen_t size = sizeof(error);
  if (getsockopt(socket.number(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  return error;
}

std::chrono::milliseconds unansweredFor(const UnsharedFile& socket) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (getsockopt(socket.number(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0 || info.tcpi_unacked == 0) return {};
  return std::chrono::milliseconds(info.tcpi_last_ack_recv);
}

bool hasTakenBytes(const UnsharedFile& socket) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  // The connection itself counts for one.
  return getsockopt(socket.number(), IPPROTO_TCP, TCP_INFO, &info, &size) == 0 && info.tcpi_bytes_acked > 1;
}

Line lineOf(const UnsharedFile& socket) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (getsockopt(socket.number(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {};
  // Older kernels tell less.
  if (size < offsetof(tcp_info, tcpi_delivery_rate) + sizeof(info.tcpi_delivery_rate)) return {};
  constexpr uint32_t kNotYet = std::numeric_limits<uint32_t>::max();
  if (info.tcpi_min_rtt == kNotYet) return {};
  const bool isIdle =
      std::chrono::milliseconds(info.tcpi_last_data_sent) > std::chrono::microseconds(info.tcpi_rtt) * 2;
  return {.roundTrip = std::chrono::microseconds(info.tcpi_min_rtt),
          .roundTripNow = std::chrono::microseconds(isIdle ? 0 : info.tcpi_rtt),
          .window = int64_t{info.tcpi_snd_cwnd} * info.tcpi_snd_mss,
          .bytesPerSecond = static_cast<int64_t>(info.tcpi_delivery_rate),
          .sent = info.tcpi_data_segs_out,
          .lost = info.tcpi_total_retrans};
}

void limitUnsent(const UnsharedFile& socket, int bytes) { set(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT, bytes); }

bool useBbr(const UnsharedFile& socket) {
  constexpr std::string_view kBbr = "bbr";
  return setsockopt(socket.number(), IPPROTO_TCP, TCP_CONGESTION, kBbr.data(), kBbr.size()) == 0;
}

}  // namespace bagua::net
