// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "backend/operation/operation.h"

namespace bagua {

// What has to be the same on all ranks when they run a program together, small enough to travel with it. The bytes that
// arrive from a peer are compared and printed, and trusted for nothing else. A change raises kWireFormat.
struct ProgramFingerprint {
  uint64_t sequence = 0;
  // The rank's own, for messages; `commonNumel` is what the ranks compare, negative where they do not.
  int64_t numel = 0;
  int64_t commonNumel = 0;
  int16_t dtype = 0;
  int16_t reduceOp = -1;
  int32_t peer = -1;
  // Hash of the operation's configuration, whose beginning is `configuration`.
  uint64_t configurationHash = 0;
  // Of the operation's gradients, whose beginning is `gradients`, and of its algorithm; 0 where there is none.
  uint32_t gradientsHash = 0;
  uint32_t step = 0;
  // Zero-terminated.
  char name[40] = {};
  char configuration[120] = {};
  char gradients[24] = {};

  // Of the fields that are compared.
  [[nodiscard]] uint64_t hash() const;
};

ProgramFingerprint fingerprintOf(const Operation& operation);

// "bagua:all_reduce #12 (Float[1024], sum)"
std::string describe(const ProgramFingerprint& fingerprint);

// Throws a MismatchError that names both ranks ("rank 2"), their programs and what to do, unless these agree. The lower
// rank comes first, so that all say the same.
void checkSameProgram(const ProgramFingerprint& lower, const std::string& lowerRank, const ProgramFingerprint& higher,
                      const std::string& higherRank);

}  // namespace bagua
