// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/tag_counts.h"

#include <iterator>

namespace bagua {

TagCounts::Runs::const_iterator TagCounts::find(int tag) const {
  const auto after = runs_.upper_bound(tag);
  if (after == runs_.begin()) return runs_.end();
  const auto run = std::prev(after);
  return run->second.last < tag ? runs_.end() : run;
}

uint32_t TagCounts::of(int tag) const {
  const auto run = find(tag);
  return run == runs_.end() ? 0 : run->second.count;
}

uint32_t TagCounts::add(int tag) {
  uint32_t count = 0;
  if (const auto run = find(tag); run != runs_.end()) {
    const int first = run->first;
    const Run whole = run->second;
    count = whole.count;
    runs_.erase(run);
    if (first < tag) runs_.insert({first, {tag - 1, count}});
    if (tag < whole.last) runs_.insert({tag + 1, {whole.last, count}});
  }
  const auto own = runs_.insert({tag, {tag, count + 1}}).first;
  join(own);
  if (own != runs_.begin()) join(std::prev(own));
  return count;
}

void TagCounts::join(Runs::iterator run) {
  const auto next = std::next(run);
  if (next == runs_.end() || next->first != run->second.last + 1 || next->second.count != run->second.count) return;
  run->second.last = next->second.last;
  runs_.erase(next);
}

}  // namespace bagua
