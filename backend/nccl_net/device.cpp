// SPDX-License-Identifier: Apache-2.0
#include "backend/nccl_net/device.h"

#include <algorithm>
#include <exception>
#include <fstream>

#include "backend/nccl_net/log.h"
#include "backend/os/local_address.h"

namespace bagua::nccl_net {
namespace {

Device findDevice() {
  Device device;
  const std::string address = net::localAddress();
  const auto all = net::interfaces();
  const auto own = std::ranges::find_if(all, [&](const auto& one) { return one.address.address() == address; });
  if (own == all.end()) return device;
  device.interface = own->name;
  int speed = 0;
  // A virtual interface says nothing, or -1.
  if (std::ifstream("/sys/class/net/" + device.interface + "/speed") >> speed && speed > 0) device.speed = speed;
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
