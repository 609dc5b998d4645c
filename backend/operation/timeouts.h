// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>

namespace bagua {

// A longer timeout is taken for this one. torch's stores and sockets count milliseconds in 32 bits, which are over
// after 24.8 days, and clocks count nanoseconds in 64 bits, which a million days overflow.
inline constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 24);

// For every timeout that comes from a user: what it returns can be added to any point in time.
inline std::chrono::milliseconds limitedTimeout(std::chrono::milliseconds timeout) {
  return std::min(timeout, kLongestTimeout);
}

// At least a millisecond, as some waits take a zero for no limit.
inline std::chrono::milliseconds leftUntil(std::chrono::steady_clock::time_point deadline) {
  const auto left = deadline - std::chrono::steady_clock::now();
  return std::max(std::chrono::duration_cast<std::chrono::milliseconds>(left), std::chrono::milliseconds(1));
}

}  // namespace bagua
