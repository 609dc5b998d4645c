// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace bagua {

// What others need to make a group with one member of it: c10d's reconfigure handle. It names a store that the member's
// process serves by itself, so that no store is needed which may have died with its host. The members of a new epoch
// meet in the store of the first of them.
struct MemberHandle {
  // The rank that the member was made with: it orders the handles of a set.
  int rank = 0;
  // Drawn for the member, and no other's.
  std::string token;
  // Where its store listens.
  std::string address;
  uint16_t port = 0;

  // Of a new member of this process. The first call starts the store, which serves until the process ends, at a port of
  // BAGUA_PORT. Throws DistNetworkError where it cannot.
  static MemberHandle draw(int rank);
  // Writes "bagua:000003:0123456789abcdef:4711:10.0.0.1"; parse() reads it, and throws ValueError for anything else.
  [[nodiscard]] std::string toString() const;
  static MemberHandle parse(const std::string& text);

  // A connection to the member's store. Throws DistBackendError, naming the member, where there is none in time.
  [[nodiscard]] c10::intrusive_ptr<c10d::Store> connect(std::chrono::milliseconds timeout) const;
};

}  // namespace bagua
