// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "backend/executor.h"

namespace bagua {

// Throws where the caller records a CUDA graph (see Executor::isCapturing): `what` is other work, or on other memory,
// each time, and a graph would go on repeating the one that was recorded, with wrong results and without an error.
void refuseCapture(const Executor& executor, const std::string& what);

}  // namespace bagua
