// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/finite_groups.h"

#include <c10/util/Exception.h>

namespace bagua::compressed {
namespace {

// Without a branch, so that the compiler makes vectors of it where groups are of one element.
template <class Bits>
bool areFinite(const Bits* values, const Piece& piece, int64_t step, Bits exponent) {
  bool areAll = true;
  for (int64_t i = piece.begin; i < piece.end; i += step) areAll &= (values[i] & exponent) != exponent;
  return areAll;
}

}  // namespace

bool areGroupsFinite(const at::Tensor& values, const Piece& piece, int64_t groupElements) {
  const void* const data = values.const_data_ptr();
  switch (values.scalar_type()) {
    case at::kDouble:
      return areFinite(static_cast<const uint64_t*>(data), piece, groupElements, uint64_t{0x7FF0000000000000});
    case at::kFloat:
      return areFinite(static_cast<const uint32_t*>(data), piece, groupElements, uint32_t{0x7F800000});
    case at::kBFloat16:
      return areFinite(static_cast<const uint16_t*>(data), piece, groupElements, uint16_t{0x7F80});
    case at::kHalf:
      return areFinite(static_cast<const uint16_t*>(data), piece, groupElements, uint16_t{0x7C00});
    default:
      TORCH_INTERNAL_ASSERT(false, "no codec decodes to ", values.scalar_type());
  }
}

}  // namespace bagua::compressed
