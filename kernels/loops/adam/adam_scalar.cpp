// SPDX-License-Identifier: Apache-2.0
#include "kernels/loops/adam/adam_loops.h"

namespace bagua::adam {
namespace {

struct Scalar {
#if defined(__aarch64__)
  static constexpr bool kRoundsOnce = true;
#else
  static constexpr bool kRoundsOnce = false;
#endif
};

}  // namespace

const Loops& scalarLoops() {
  static constexpr Loops kLoops = loopsOf<Scalar>("scalar");
  return kLoops;
}

}  // namespace bagua::adam
