// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "kernels/codec.h"

namespace cuda_on_cpu {

// What a registered codec is on CUDA, for tensors of the CPU: its kernels run on the CPU.
const bagua::Codec& codec(const std::string& name);
// The same of rawCodec().
std::shared_ptr<const bagua::Codec> rawCodec(at::ScalarType dtype);

}  // namespace cuda_on_cpu
