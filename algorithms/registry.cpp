// SPDX-License-Identifier: Apache-2.0
#include "algorithms/registry.h"

namespace bagua {

template <>
std::map<std::string, AlgorithmInfo>& AlgorithmRegistry::entries() {
  static std::map<std::string, AlgorithmInfo> all;
  return all;
}

}  // namespace bagua
