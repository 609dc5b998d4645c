// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace bagua::compressed {

// What codes finer than `codec`, `levels` times in a row: 1, 2, 4, 8 bits, and float32, which is an empty name.
std::string finerThan(const std::string& codec, int64_t levels);

// What a codec may lose of a gradient, as a part of its squared norm without outliers: what the next one with fewer
// bits loses of normal numbers. A codec that loses more is not worth its bits.
double soundLossOf(const std::string& codec);

}  // namespace bagua::compressed
