// SPDX-License-Identifier: Apache-2.0
#include "python_shim/bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The compiled part of bagua. Typed in _C.pyi; not an interface for users.";
  bagua::bindBackend(module);
  bagua::bindAlgorithms(module);
  bagua::bindAlgorithmOptions(module);
  bagua::bindOperations(module);
}
