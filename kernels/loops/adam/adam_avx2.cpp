// SPDX-License-Identifier: Apache-2.0
#include "kernels/loops/adam/adam_loops.h"

namespace bagua::adam {
namespace {

struct Avx2 {
  static constexpr bool kRoundsOnce = true;
};

}  // namespace

const Loops& avx2Loops() {
  static constexpr Loops kLoops = loopsOf<Avx2>("avx2");
  return kLoops;
}

}  // namespace bagua::adam
