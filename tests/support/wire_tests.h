// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "backend/net/signal.h"

// What tests of the transport have in common.
namespace bagua::net {

using Bytes = std::vector<uint8_t>;

// Counts up from `first`, and begins again after a prime number of bytes: no two frames of a message are alike, so that
// one in the place of another is found.
inline Bytes pattern(uint64_t size, uint8_t first) {
  constexpr uint8_t kPeriod = 251;
  Bytes bytes(size);
  uint8_t step = 0;
  for (uint8_t& byte : bytes) {
    byte = static_cast<uint8_t>(first + step);
    if (++step == kPeriod) step = 0;
  }
  return bytes;
}

// Whether the condition comes true, of which every change is told by `signal`.
template <class Condition>
bool comes(Signal& signal, const Condition& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (true) {
    const uint64_t count = signal.count();
    if (condition()) return true;
    if (!signal.waitPast(count, deadline)) return false;
  }
}

}  // namespace bagua::net
