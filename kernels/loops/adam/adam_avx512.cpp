// SPDX-License-Identifier: Apache-2.0
#include "kernels/loops/adam/adam_loops.h"

namespace bagua::adam {
namespace {

struct Avx512 {
  static constexpr bool kRoundsOnce = true;
};

}  // namespace

const Loops& avx512Loops() {
  static constexpr Loops kLoops = loopsOf<Avx512>("avx512");
  return kLoops;
}

}  // namespace bagua::adam
