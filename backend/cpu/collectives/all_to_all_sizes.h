// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backend/cpu/cpu_connections.h"

namespace bagua {

// On all ranks, ahead of an all-to-all whose sizes only its two ends know. Throws a MismatchError if a rank is to get
// from this one, or this one from it, another number of bytes than it is sent: the network between hosts would end the
// process; a RefusedError if a rank refuses its arguments, as `isRefused` says of this one. What a wire checks itself
// is left to it: its next exchange then throws. `item`: bytes per element, for the message.
void checkAllToAllSizes(CpuConnections& connections, const ProgramFingerprint& program, const RankParts& parts,
                        int64_t item, bool isRefused, CpuConnections::Deadline deadline);

}  // namespace bagua
