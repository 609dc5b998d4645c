// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

namespace bagua {

// For a thread of ours that calls CUDA or NCCL: what it does creates no context on another device and breaks no capture
// of another thread.
void prepareDeviceThread(c10::Device device);

}  // namespace bagua
