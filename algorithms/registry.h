// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>

#include "algorithms/algorithm.h"
#include "kernels/registry.h"

namespace bagua {

// Filled by BAGUA_REGISTER_ALGORITHM in each algorithm's folder.
using AlgorithmRegistry = Registry<AlgorithmInfo>;
template <>
std::map<std::string, AlgorithmInfo>& AlgorithmRegistry::entries();

}  // namespace bagua

// At namespace scope of an algorithm's .cpp file.
#define BAGUA_REGISTER_ALGORITHM(...)                                      \
  namespace {                                                              \
  [[maybe_unused]] const bool BAGUA_OWN_NAME(kIsRegistered) =              \
      ::bagua::AlgorithmRegistry::add(::bagua::AlgorithmInfo __VA_ARGS__); \
  }
