// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

namespace bagua {

// Members 0 .. count - 1 in rows of about the root of their number, the last row shorter where they do not fill it.
// What one has for another goes to the one in its own row and the other's column, together with what it has for the
// rest of that column, and from there together with what others have for the same one. So all send something to each
// other in two rounds, with as many messages as a row and a column have members, and twice the bytes.
class Grid {
 public:
  explicit Grid(int count);

  [[nodiscard]] int count() const { return count_; }
  [[nodiscard]] int columns() const { return columns_; }
  [[nodiscard]] int rows() const { return (count_ + columns_ - 1) / columns_; }
  [[nodiscard]] int columnOf(int member) const { return member % columns_; }
  // In ascending order.
  [[nodiscard]] std::vector<int> membersOf(int column) const;
  // Through whom `from` reaches the members of `column`; where its row has nobody there, full rows help in turn.
  [[nodiscard]] int relayOf(int from, int column) const;
  // Those that reach the members of its column through `relay`, itself among them, in ascending order.
  [[nodiscard]] std::vector<int> sourcesOf(int relay) const;

  // Of a member in both rounds: messages, and parts in them.
  [[nodiscard]] int messages() const { return columns_ - 1 + rows() - 1; }
  [[nodiscard]] int parts() const { return (columns_ - 1) * rows() + (rows() - 1) * columns_; }

 private:
  const int count_;
  const int columns_;
};

}  // namespace bagua
