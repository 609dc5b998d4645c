// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "backend/net/transport.h"

namespace bagua::net {

// Returns the transport of this process, which all of its groups share. The first call makes it, at localAddress().
// Throws DistNetworkError or ValueError. A forked child gets one of its own.
std::shared_ptr<Transport> processTransport();
// Makes another one at the same address, for a rank that is not alone in its process.
std::shared_ptr<Transport> newTransport(config::PortRange ports = config::ports());

}  // namespace bagua::net
