// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace bagua::nccl_net {

// The one network device that NCCL sees: the interface that the transport listens at.
struct Device {
  std::string interface = "bagua";
  // In Mbit/s: as NCCL takes it where an interface does not tell.
  int speed = 10'000;
};

// Returns that of this process, which is looked up once.
const Device& ownDevice();

}  // namespace bagua::nccl_net
