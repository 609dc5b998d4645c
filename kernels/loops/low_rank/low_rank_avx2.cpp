// SPDX-License-Identifier: Apache-2.0
#include "kernels/loops/low_rank/low_rank_loops.h"

namespace bagua::low_rank {
namespace {

struct Avx2 {};

}  // namespace

const Loops& avx2Loops() {
  static constexpr Loops kLoops = loopsOf<Avx2>("avx2");
  return kLoops;
}

}  // namespace bagua::low_rank
