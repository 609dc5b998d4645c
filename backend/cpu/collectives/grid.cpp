// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/collectives/grid.h"

#include <cmath>

namespace bagua {

Grid::Grid(int count) : count_(count), columns_(static_cast<int>(std::ceil(std::sqrt(count)))) {}

std::vector<int> Grid::membersOf(int column) const {
  std::vector<int> members;
  for (int member = column; member < count_; member += columns_) members.push_back(member);
  return members;
}

int Grid::relayOf(int from, int column) const {
  const int relay = from / columns_ * columns_ + column;
  return relay < count_ ? relay : columnOf(from) % (rows() - 1) * columns_ + column;
}

std::vector<int> Grid::sourcesOf(int relay) const {
  std::vector<int> sources;
  for (int from = 0; from < count_; ++from) {
    if (relayOf(from, columnOf(relay)) == relay) sources.push_back(from);
  }
  return sources;
}

}  // namespace bagua
