// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "algorithms/options.h"
#include "backend/executor.h"

// What the sources that bind algorithms share.
namespace bagua {

// An opaque object for Python: pybind11 would turn a bare provider into what it really is, the process group.
struct Executors {
  std::shared_ptr<ExecutorProvider> provider;
};

using OptionValues = std::map<std::string, OptionValue>;

// Of Python's values, exactly the types of an option: pybind11's own casters would take None for False, and any object
// with __float__. Names come first: the value of one that does not exist may be anything. `others` as for
// checkOptionName().
OptionValues optionValues(const std::string& algorithm, const pybind11::dict& given,
                          const std::vector<std::string>& others = {});
// And back.
pybind11::dict pythonValues(const std::string& algorithm, const OptionValues& values);

}  // namespace bagua
