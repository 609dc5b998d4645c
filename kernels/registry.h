// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/closest_names.h"

// A name that no other place of a translation unit has, which may be several sources in one.
#define BAGUA_OWN_NAME(name) BAGUA_JOINED(name, __COUNTER__)
#define BAGUA_JOINED(name, number) BAGUA_JOINED_AS_THEY_ARE(name, number)
#define BAGUA_JOINED_AS_THEY_ARE(name, number) name##number

namespace bagua {

// Of an Info whose place in listings nobody cares about.
inline constexpr int kNoPosition = std::numeric_limits<int>::max();

// Name -> Info: codecs, algorithms. Filled while the library is loaded, by a macro in the folder of each; read-only
// afterwards. An Info has a name, its position in listings, and kKind, what it is, as a word that takes an s in the
// plural.
template <class Info>
class Registry {
 public:
  // Returns true, so that it can initialise a static.
  static bool add(Info info) {
    for (const auto& [name, other] : entries()) {
      TORCH_INTERNAL_ASSERT(name != info.name, "two ", Info::kKind, "s are registered as '", name, "'");
      TORCH_INTERNAL_ASSERT(info.position == kNoPosition || info.position != other.position, Info::kKind, "s '", name,
                            "' and '", info.name, "' are both registered at position ", info.position);
    }
    const std::string name = info.name;
    entries().emplace(name, std::move(info));
    return true;
  }

  // Throws ValueError that lists the registered names, and says which of them may have been meant.
  static const Info& find(const std::string& name) {
    const auto entry = entries().find(name);
    if (entry != entries().end()) return entry->second;
    std::string valid;
    for (const auto& known : names()) valid += (valid.empty() ? "" : ", ") + known;
    TORCH_CHECK_VALUE(false, "no ", Info::kKind, " is named '", name, "'", suggestionFor(name, names()),
                      "; available: ", valid);
  }

  // In the order of their positions, those without one in the order of their names.
  static std::vector<std::string> names() {
    std::vector<std::string> all;
    all.reserve(entries().size());
    for (const auto& [name, info] : entries()) all.push_back(name);
    std::ranges::stable_sort(all, {}, [](const std::string& name) { return entries().at(name).position; });
    return all;
  }

 private:
  // A function's static, usable from the initialisers of other files, whatever their order. Each Info specialises it in
  // one source file, so that there is one map in the process.
  static std::map<std::string, Info>& entries();
};

}  // namespace bagua
