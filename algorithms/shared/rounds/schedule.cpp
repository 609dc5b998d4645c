// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/rounds/schedule.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace bagua::rounds {

Schedule::Schedule(int64_t every, int64_t fragments, int64_t delay, int64_t begin)
    : fragments_(fragments), interval_(every / std::max<int64_t>(fragments, 1)), delay_(delay), begin_(begin) {
  TORCH_CHECK_VALUE(every >= 1, "bagua: sync_every must be at least 1, got ", every);
  TORCH_CHECK_VALUE(fragments >= 1, "bagua: fragments must be at least 1, got ", fragments);
  TORCH_CHECK_VALUE(every % fragments == 0, "bagua: sync_every must be a multiple of fragments, got sync_every=", every,
                    " and fragments=", fragments);
  TORCH_CHECK_VALUE(delay >= 0, "bagua: delay must not be negative, got ", delay);
  TORCH_CHECK_VALUE(delay < interval_, "bagua: delay must be less than sync_every / fragments = ", interval_,
                    " steps, so that one fragment travels at a time, got ", delay);
}

}  // namespace bagua::rounds
