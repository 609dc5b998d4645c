// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "backend/net/frame.h"

namespace bagua::net {

// Returns what the numbers of connections that `opener` opens have as their remainder: see Hello.
inline uint64_t parityOf(const ProcessId& opener, const ProcessId& other) { return opener < other ? 0 : 1; }

inline std::vector<uint8_t> answerOf(const Hello& hello) {
  auto bytes = bytesOf(Frame{.kind = Frame::Kind::kWelcome, .contextBytes = sizeof(Hello)});
  const auto context = bytesOf(hello);
  bytes.insert(bytes.end(), context.begin(), context.end());
  return bytes;
}

}  // namespace bagua::net
