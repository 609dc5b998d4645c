// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace bagua {

// Copies bytes that another core reads next, past this core's cache where the processor can. The reader then finds them
// in memory instead of, modified, in this core's cache. Between two cores that seem to have no cache in common an
// allreduce of 1 MiB takes 110 instead of 520 us, of 64 MiB 8.8 instead of 34 ms; otherwise it is as fast either way.
// They are there for whoever has seen a later write of this thread.
void streamingCopy(uint8_t* to, const uint8_t* from, int64_t bytes);

}  // namespace bagua
