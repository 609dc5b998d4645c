// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace bagua::ranks {

// What the kernel has counted on the connected TCP sockets of this process: no counter of the code under test.
struct SocketCounts {
  int64_t connections = 0;
  // Segments with data: on loopback, where one holds 64 KiB, as many as small messages.
  int64_t segments = 0;
  int64_t bytes = 0;
};

// Of the sockets to other ranks, and of those to the store at `storePort`. The store's own ends are left out.
struct ProcessCounts {
  SocketCounts peers;
  SocketCounts store;
};
ProcessCounts countSockets(uint16_t storePort);

// Bytes of memory that this process alone has written.
int64_t privateMemory();

}  // namespace bagua::ranks
