// SPDX-License-Identifier: Apache-2.0
#include "kernels/loops/low_rank/low_rank_loops.h"

namespace bagua::low_rank {
namespace {

struct Scalar {};

}  // namespace

const Loops& scalarLoops() {
  static constexpr Loops kLoops = loopsOf<Scalar>("scalar");
  return kLoops;
}

}  // namespace bagua::low_rank
