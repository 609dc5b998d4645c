// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backend/cpu/cpu_connections.h"

namespace bagua {

// On all ranks, ahead of an all-to-all whose sizes only its two ends know. Throws a MismatchError if a rank of this
// host is to get from this one, or this one from it, another number of bytes than it is sent; a RefusedError if one
// refuses its arguments, as `isRefused` says of this one. Between hosts the next exchange of the wire throws the same.
// `item`: bytes per element, for the message.
void checkAllToAllSizes(CpuConnections& connections, const RankParts& parts, int64_t item, bool isRefused,
                        CpuConnections::Deadline deadline);

}  // namespace bagua
