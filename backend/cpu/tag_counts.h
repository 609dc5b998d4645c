// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace bagua {

// How many messages there have been with each tag. Neighbouring tags with as many share an entry: whoever takes a new
// tag for each message, the next one, does not have it grow.
class TagCounts {
 public:
  [[nodiscard]] uint32_t of(int tag) const;
  // Counts one more. Returns how many there were before.
  uint32_t add(int tag);
  [[nodiscard]] size_t entries() const { return runs_.size(); }

 private:
  // Tags up to `last`, each with `count` messages.
  struct Run {
    int last;
    uint32_t count;
  };
  using Runs = std::map<int, Run>;

  [[nodiscard]] Runs::const_iterator find(int tag) const;
  // With the run after it, where that goes on with as many.
  void join(Runs::iterator run);

  // By their first tags.
  Runs runs_;
};

}  // namespace bagua
