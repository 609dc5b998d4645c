// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/rounds/fragments.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

namespace bagua::rounds {
namespace {

// Parameters that stay together, and their elements.
struct Unit {
  std::vector<int64_t> positions;
  int64_t length = 0;
};

std::vector<Unit> unitsOf(const std::vector<int64_t>& lengths, const std::vector<int64_t>& layers) {
  std::vector<Unit> units;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const bool isSameLayer = i > 0 && !layers.empty() && layers[i] == layers[i - 1];
    if (!isSameLayer) units.emplace_back();
    units.back().positions.push_back(static_cast<int64_t>(i));
    units.back().length += lengths[i];
  }
  return units;
}

// Whether neighbouring units fit into `fragments` of at most `most` elements.
bool fit(const std::vector<Unit>& units, int64_t fragments, int64_t most) {
  int64_t used = 1;
  int64_t held = 0;
  for (const auto& unit : units) {
    if (unit.length > most) return false;
    if (held + unit.length > most) {
      ++used;
      held = 0;
    }
    held += unit.length;
  }
  return used <= fragments;
}

// The fragment of each unit.
std::vector<int64_t> placesOfNeighbours(const std::vector<Unit>& units, int64_t fragments) {
  int64_t least = 0;
  int64_t most = std::accumulate(units.begin(), units.end(), int64_t{0},
                                 [](int64_t sum, const Unit& u) { return sum + u.length; });
  while (least < most) {
    const int64_t middle = least + (most - least) / 2;
    if (fit(units, fragments, middle)) {
      most = middle;
    } else {
      least = middle + 1;
    }
  }
  std::vector<int64_t> places;
  int64_t place = 0;
  int64_t held = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    // The units that are left have to reach the fragments that are left.
    const bool isLast = static_cast<int64_t>(units.size() - i) == fragments - 1 - place;
    if (i > 0 && (held + units[i].length > most || isLast)) {
      ++place;
      held = 0;
    }
    held += units[i].length;
    places.push_back(place);
  }
  return places;
}

std::vector<int64_t> placesInTurn(size_t units, int64_t fragments) {
  std::vector<int64_t> places(units);
  for (size_t i = 0; i < units; ++i) places[i] = static_cast<int64_t>(i) % fragments;
  return places;
}

}  // namespace

Pattern patternOf(const std::string& name) {
  TORCH_CHECK_VALUE(name == "consecutive" || name == "strided",
                    "bagua: fragment_pattern is 'consecutive' or 'strided', got '", name, "'");
  return name == "strided" ? Pattern::kStrided : Pattern::kConsecutive;
}

std::vector<std::vector<int64_t>> cutIntoFragments(const std::vector<int64_t>& lengths,
                                                   const std::vector<int64_t>& layers, int64_t fragments,
                                                   Pattern pattern) {
  TORCH_INTERNAL_ASSERT(layers.empty() || layers.size() == lengths.size());
  std::vector<Unit> units = unitsOf(lengths, layers);
  if (static_cast<int64_t>(units.size()) < fragments) units = unitsOf(lengths, {});
  TORCH_CHECK_VALUE(static_cast<int64_t>(units.size()) >= fragments, "bagua: a model of ", lengths.size(),
                    " trainable parameters cannot be cut into fragments=", fragments);
  const std::vector<int64_t> places =
      pattern == Pattern::kStrided ? placesInTurn(units.size(), fragments) : placesOfNeighbours(units, fragments);
  std::vector<std::vector<int64_t>> cut(fragments);
  for (size_t i = 0; i < units.size(); ++i) {
    auto& fragment = cut[places[i]];
    fragment.insert(fragment.end(), units[i].positions.begin(), units[i].positions.end());
  }
  return cut;
}

}  // namespace bagua::rounds
