// SPDX-License-Identifier: Apache-2.0
#include "algorithms/registry.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

namespace bagua {
namespace {

// A function's static: usable from the initialisers of other files, whatever their order.
std::map<std::string, AlgorithmInfo>& algorithms() {
  static std::map<std::string, AlgorithmInfo> all;
  return all;
}

}  // namespace

bool AlgorithmRegistry::add(AlgorithmInfo info) {
  const std::string name = info.name;
  const bool isNew = algorithms().emplace(name, std::move(info)).second;
  TORCH_INTERNAL_ASSERT(isNew, "two algorithms are registered as '", name, "'");
  return true;
}

const AlgorithmInfo& AlgorithmRegistry::find(const std::string& name) {
  const auto entry = algorithms().find(name);
  if (entry != algorithms().end()) return entry->second;
  std::string valid;
  for (const auto& known : names()) valid += (valid.empty() ? "" : ", ") + known;
  TORCH_CHECK_VALUE(false, "no algorithm is named '", name, "'; available: ", valid);
}

std::vector<std::string> AlgorithmRegistry::names() {
  std::vector<std::string> all;
  all.reserve(algorithms().size());
  for (const auto& [name, info] : algorithms()) all.push_back(name);
  std::sort(all.begin(), all.end(), [](const std::string& one, const std::string& other) {
    return algorithms().at(one).position < algorithms().at(other).position;
  });
  return all;
}

}  // namespace bagua
