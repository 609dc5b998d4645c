// SPDX-License-Identifier: Apache-2.0
#include "kernels/loops/low_rank/low_rank_loops.h"

namespace bagua::low_rank {
namespace {

struct Avx512 {};

}  // namespace

const Loops& avx512Loops() {
  static constexpr Loops kLoops = loopsOf<Avx512>("avx512");
  return kLoops;
}

}  // namespace bagua::low_rank
