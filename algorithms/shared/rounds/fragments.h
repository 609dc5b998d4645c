// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bagua::rounds {

enum class Pattern {
  // Neighbouring layers, so that the longest fragment is as short as can be.
  kConsecutive,
  // Layer l in fragment l mod fragments.
  kStrided,
};

// "consecutive" or "strided"; throws ValueError.
Pattern patternOf(const std::string& name);

// The positions of each fragment's parameters, ascending. `lengths`: elements of each parameter; `layers`: the layer of
// each, the same number for neighbours of one layer, or empty. Where there are fewer layers than fragments, or none are
// known, parameters are taken for layers. Throws ValueError where there are fewer parameters than fragments.
std::vector<std::vector<int64_t>> cutIntoFragments(const std::vector<int64_t>& lengths,
                                                   const std::vector<int64_t>& layers, int64_t fragments,
                                                   Pattern pattern);

}  // namespace bagua::rounds
