// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "backend/net/frame.h"
#include "backend/net/socket.h"

namespace bagua::net {

// Other processes reach one by its address.
struct ProcessAddress {
  ProcessId process{};
  SocketAddress address;

  // Writes "0123456789abcdef0123456789abcdef@10.0.0.1:4711"; parse() reads it, and throws ValueError for anything else.
  [[nodiscard]] std::string toString() const;
  static ProcessAddress parse(const std::string& text);
};

}  // namespace bagua::net
