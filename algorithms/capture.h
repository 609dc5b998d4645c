// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "backend/executor.h"

namespace bagua {

// Throws where the caller records a CUDA graph on `device` (see ExecutorProvider::isCapturing): the work is another, or
// on other memory, each time, and a graph would go on repeating the one that was recorded, with wrong results and
// without an error. `kind` and `name` say in the error what it is.
void refuseCapture(const ExecutorProvider& group, at::Device device, const char* kind, const std::string& name = {});

}  // namespace bagua
