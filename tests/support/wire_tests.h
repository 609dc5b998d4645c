// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <numeric>
#include <vector>

#include "backend/net/signal.h"

// What tests of the transport have in common.
namespace bagua::net {

using Bytes = std::vector<uint8_t>;

// Counts up from `first`.
inline Bytes pattern(uint64_t size, uint8_t first) {
  Bytes bytes(size);
  std::iota(bytes.begin(), bytes.end(), first);
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
