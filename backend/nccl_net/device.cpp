// SPDX-License-Identifier: Apache-2.0
#include "backend/nccl_net/device.h"

#include <ifaddrs.h>
#include <netinet/in.h>

#include <exception>
#include <fstream>
#include <memory>

#include "backend/nccl_net/log.h"
#include "backend/net/socket.h"
#include "backend/os/local_address.h"

namespace bagua::nccl_net {
namespace {

Device findDevice() {
  Device device;
  const std::string address = net::localAddress();
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return device;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, freeifaddrs);
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    const sockaddr* const own = entry->ifa_addr;
    if (own == nullptr || (own->sa_family != AF_INET && own->sa_family != AF_INET6)) continue;
    const socklen_t size = own->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (net::SocketAddress(own, size).address() != address) continue;
    device.interface = entry->ifa_name;
    int speed = 0;
    // A virtual interface says nothing, or -1.
    if (std::ifstream("/sys/class/net/" + device.interface + "/speed") >> speed && speed > 0) device.speed = speed;
    break;
  }
  return device;
}

}  // namespace

const Device& ownDevice() {
  static const Device unknown;
  try {
    // NCCL keeps the pointer to the name.
    static const auto* const device = new Device(findDevice());  // NOLINT(cppcoreguidelines-owning-memory)
    return *device;
  } catch (const std::exception& error) {
    // NCCL would take its own sockets. It hears of this again when it listens.
    warn(error.what());
    return unknown;
  }
}

}  // namespace bagua::nccl_net
