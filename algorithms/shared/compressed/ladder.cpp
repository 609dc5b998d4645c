// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/ladder.h"

#include <algorithm>
#include <array>

#include "kernels/codec.h"

namespace bagua::compressed {
namespace {

struct Rung {
  const char* codec;
  // Of normal numbers, as kernels/README.md has it.
  double loss;
};
constexpr std::array kLadder = {Rung{"1bit", 0.36}, Rung{"2bit", 0.116}, Rung{"4bit", 0.0072}, Rung{"int8", 4.2e-5}};

double bitsOf(const std::string& codec) { return CodecRegistry::find(codec).bitsPerElement(); }

}  // namespace

std::string finerThan(const std::string& codec, int64_t levels) {
  std::string finer = codec;
  for (; levels > 0 && !finer.empty(); --levels) {
    const auto next = std::find_if(kLadder.begin(), kLadder.end(),
                                   [&](const Rung& rung) { return bitsOf(rung.codec) > bitsOf(finer); });
    finer = next == kLadder.end() ? "" : next->codec;
  }
  return finer;
}

// minmax_uint8 has as many bits as int8, but for the scales.
double soundLossOf(const std::string& codec) {
  double loss = 1;
  for (const Rung& rung : kLadder) {
    if (bitsOf(rung.codec) <= 0.75 * bitsOf(codec)) loss = rung.loss;
  }
  return loss;
}

}  // namespace bagua::compressed
