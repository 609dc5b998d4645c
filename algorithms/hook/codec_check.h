// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "algorithms/options.h"

namespace bagua {

// Throws where the option "codec", one codec or "pattern=codec, ...", names one that takes no tensors of that device.
void checkCodecs(const std::string& algorithm, const Options& options, at::Device device);

}  // namespace bagua
