// SPDX-License-Identifier: Apache-2.0
#include "kernels/codecs/block_scaled/block_scaled_loops.h"

namespace bagua::block_scaled {
namespace {

struct Scalar {
  static constexpr int kWidth = 1;

  static void loadHalves(const HalfBits* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = ElementTraits<HalfBits>::load(from[i]);
  }
  static void storeHalves(const float* from, int64_t count, HalfBits* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = ElementTraits<HalfBits>::store(from[i]);
  }
};

}  // namespace

const Loops& scalarLoops() {
  static constexpr Loops kLoops = loopsOf<Scalar>();
  return kLoops;
}

}  // namespace bagua::block_scaled
