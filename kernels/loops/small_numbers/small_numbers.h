// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace bagua {

// Numbers kept in 8 bits: groups of 128 share a scale, the least power of two by which all of a group fit into -127 to
// 127; codes are rounded to the nearest. What was decoded is coded to the same bytes again.
struct SmallNumbers {
  at::Tensor codes;
  // Of the scales, with the bias of float32; one for a group.
  at::Tensor exponents;

  // Of a flat, contiguous float32 tensor of finite numbers; those beyond 2^127 become about that.
  static SmallNumbers encoded(const at::Tensor& values);
  // Of old * keep + left * gain: `old` decoded, which has as many numbers as `left`, and `left` as above.
  static SmallNumbers blended(const SmallNumbers& old, float keep, const at::Tensor& left, float gain);

  [[nodiscard]] at::Tensor decoded() const;
  [[nodiscard]] int64_t bytes() const;
};

}  // namespace bagua
