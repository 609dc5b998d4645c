// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>

#include <memory>

#include "kernels/codec.h"

namespace bagua {

// Values as they are, for those that have to stay exact and yet travel in the messages of others. Not registered: its
// layout is that of one type of values, and it knows no feedback, as nothing is left behind.
std::shared_ptr<const Codec> rawCodec(at::ScalarType dtype);

}  // namespace bagua
