// SPDX-License-Identifier: Apache-2.0
#include "kernels/adam/adam_loops.h"

namespace bagua::adam {
namespace {

struct Scalar {
  static constexpr bool kRoundsOnce = false;
};

}  // namespace

const Loops& scalarLoops() {
  static constexpr Loops kLoops = loopsOf<Scalar>("scalar");
  return kLoops;
}

}  // namespace bagua::adam
