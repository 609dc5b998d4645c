// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/elements.h"

// What Codec::encodeChunks() works on, for loops and kernels.
namespace bagua {

// A tensor of `length` elements in `chunks` chunks: of `stride` elements each, the last ones shorter or empty.
struct Cut {
  int64_t length;
  int64_t chunks;
  int64_t stride;

  BAGUA_HOST_DEVICE int64_t begin(int64_t chunk) const {
    // Compared before multiplying: with more chunks than elements the product may pass the end.
    return stride == 0 || chunk > length / stride ? length : chunk * stride;
  }
  BAGUA_HOST_DEVICE int64_t size(int64_t chunk) const {
    const int64_t left = length - begin(chunk);
    return left < stride ? left : stride;
  }
};

// Packed chunks, a row each. Byte is uint8_t, or const.
template <class Byte>
struct PackedRows {
  Byte* bytes;
  // From the begin of a row to that of the next, and to its end.
  int64_t distance;
  int64_t rowBytes;

  [[nodiscard]] BAGUA_HOST_DEVICE Byte* row(int64_t chunk) const { return bytes + chunk * distance; }
};

}  // namespace bagua
