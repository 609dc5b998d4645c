// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/utils/pybind.h>

// One function per area of the extension module bagua._C.
namespace bagua {

void bindBackend(pybind11::module& module);
void bindAlgorithms(pybind11::module& module);

}  // namespace bagua
