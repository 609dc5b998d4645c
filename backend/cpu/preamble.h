// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

#include "backend/net/frame.h"
#include "backend/operation/program_fingerprint.h"

namespace bagua {

// With the first message from one rank to another in a program. A change raises kWireFormat (rendezvous/wire_format.h).
struct Preamble {
  ProgramFingerprint program;
  int64_t sent = 0;
  int64_t expected = 0;
  // A rank that has refused its arguments; negative: none.
  int64_t refusing = -1;
};
static_assert(std::is_trivially_copyable_v<Preamble> && sizeof(Preamble) <= net::kMostContext);

inline bool fits(const Preamble& own, const Preamble& theirs) {
  return theirs.refusing < 0 && own.program.hash() == theirs.program.hash() && own.sent == theirs.expected &&
         own.expected == theirs.sent;
}

}  // namespace bagua
