// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "algorithms/algorithm.h"

namespace bagua {

// Name -> algorithm. Filled while the library is loaded, by BAGUA_REGISTER_ALGORITHM in each algorithm's folder;
// read-only afterwards.
class AlgorithmRegistry {
 public:
  // Returns true, so that it can initialise a static.
  static bool add(AlgorithmInfo info);
  // Throws ValueError that lists the registered names.
  static const AlgorithmInfo& find(const std::string& name);
  // In the order of their positions.
  static std::vector<std::string> names();
};

}  // namespace bagua

// At namespace scope of an algorithm's .cpp file.
#define BAGUA_REGISTER_ALGORITHM(...)                                                                              \
  namespace {                                                                                                      \
  [[maybe_unused]] const bool kIsRegistered = ::bagua::AlgorithmRegistry::add(::bagua::AlgorithmInfo __VA_ARGS__); \
  }
