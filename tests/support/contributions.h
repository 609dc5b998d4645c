// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>

#include <cstdint>

namespace bagua::testing {

// The contribution of a rank: small integers, so that every order of additions gives the same.
inline at::Tensor contribution(int rank, int64_t numel, at::ScalarType dtype = at::kFloat) {
  return ((at::arange(numel, at::kLong) * 7 + rank * 3) % 11 - 5).to(dtype);
}

// Of all ranks.
inline at::Tensor sumOf(int size, int64_t numel, at::ScalarType dtype = at::kFloat) {
  at::Tensor sum = at::zeros({numel}, dtype);
  for (int rank = 0; rank < size; ++rank) sum += contribution(rank, numel, dtype);
  return sum;
}

}  // namespace bagua::testing
