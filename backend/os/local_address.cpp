// SPDX-License-Identifier: Apache-2.0
#include "backend/os/local_address.h"

#include <arpa/inet.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "backend/config.h"

namespace bagua::net {
namespace {

bool isLoopback(const SocketAddress& address) {
  if (address.family() == AF_INET) {
    const auto* const four = reinterpret_cast<const sockaddr_in*>(address.get());
    return ntohl(four->sin_addr.s_addr) >> 24U == 127;
  }
  const auto* const six = reinterpret_cast<const sockaddr_in6*>(address.get());
  return IN6_IS_ADDR_LOOPBACK(&six->sin6_addr);
}

// Needs no interface beside it to be meant.
bool isOfAnyUse(const sockaddr* address) {
  if (address == nullptr) return false;
  if (address->sa_family == AF_INET) return true;
  if (address->sa_family != AF_INET6) return false;
  return !IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

socklen_t sizeOf(const sockaddr* address) {
  return address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
}

// What a host's name stands for.
std::vector<SocketAddress> addressesOf(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* list = nullptr;
  if (getaddrinfo(host.c_str(), nullptr, &hints, &list) != 0) return {};
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, freeaddrinfo);
  std::vector<SocketAddress> found;
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    if (isOfAnyUse(entry->ai_addr)) found.emplace_back(entry->ai_addr, entry->ai_addrlen);
  }
  return found;
}

// From which this host would send to `target`. No packet leaves.
std::optional<SocketAddress> sourceFor(const SocketAddress& target) {
  const SocketAddress withPort(target.address(), 9);
  const UnsharedFile socket(::socket(target.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket.isOpen() || connect(socket.number(), withPort.get(), withPort.size()) != 0) return std::nullopt;
  return addressOf(socket);
}

std::string addressOfInterface(const std::string& name, const std::vector<Interface>& all) {
  const auto found = std::ranges::find_if(all, [&](const Interface& one) { return one.name == name; });
  if (found != all.end()) return found->address.address();
  TORCH_CHECK_VALUE(false, "bagua: no network interface '", name,
                    "' is up and has an address (BAGUA_SOCKET_IFNAME, GLOO_SOCKET_IFNAME). There are: ", namesOf(all));
}

std::string hostName() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

}  // namespace

std::string namesOf(const std::vector<Interface>& all) {
  std::set<std::string> names;
  for (const auto& one : all) names.insert(one.name);
  return c10::Join(", ", names);
}

std::vector<Interface> interfaces() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, freeifaddrs);
  std::vector<Interface> found;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    const bool isUp = (entry->ifa_flags & IFF_UP) != 0;
    if (isUp && isOfAnyUse(entry->ifa_addr)) {
      found.push_back({entry->ifa_name, SocketAddress(entry->ifa_addr, sizeOf(entry->ifa_addr))});
    }
  }
  std::ranges::stable_sort(found, [](const Interface& a, const Interface& b) {
    return a.address.family() == AF_INET && b.address.family() != AF_INET;
  });
  return found;
}

std::string localAddress() {
  const auto all = interfaces();
  if (const auto name = config::socketInterface()) return addressOfInterface(*name, all);
  std::vector<SocketAddress> candidates;
  if (const auto master = config::masterAddress()) {
    for (const auto& target : addressesOf(*master)) {
      if (const auto source = sourceFor(target)) candidates.push_back(*source);
      // A job within one machine is not to be seen from others.
      if (isLoopback(target) && (*master == "localhost" || *master == target.address())) return target.address();
    }
  }
  const auto isOwn = [&](const SocketAddress& address) {
    return std::ranges::any_of(all, [&](const Interface& one) { return one.address.address() == address.address(); });
  };
  for (const auto& address : addressesOf(hostName())) {
    if (isOwn(address)) candidates.push_back(address);
  }
  for (const auto& one : all) candidates.push_back(one.address);
  const auto found = std::ranges::find_if_not(candidates, isLoopback);
  if (found != candidates.end()) return found->address();
  return candidates.empty() ? "127.0.0.1" : candidates.front().address();
}

}  // namespace bagua::net
