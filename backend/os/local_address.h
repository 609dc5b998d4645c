// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "backend/net/socket.h"

namespace bagua::net {

struct Interface {
  std::string name;
  SocketAddress address;
};

// Returns every address of every network interface that is up, IPv4 first, but those that mean nothing without the name
// of an interface beside them.
std::vector<Interface> interfaces();

// The name of each once, as "eth0, lo".
std::string namesOf(const std::vector<Interface>& all);

// The address at which the processes of other hosts can reach this one, as "10.0.0.1" or "fd00::1". The first that
// there is of: the address of the network interface that BAGUA_SOCKET_IFNAME, or else GLOO_SOCKET_IFNAME, names; the
// one from which MASTER_ADDR is reached; the one that the host's name stands for; the first of an interface that is up.
// A loopback address is taken where there is no other. Throws ValueError where a named interface has none.
std::string localAddress();

}  // namespace bagua::net
