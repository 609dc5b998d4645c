// SPDX-License-Identifier: Apache-2.0
// Single operations, for Python that has its own idea of when.
#include <pybind11/stl.h>

#include <optional>

#include "algorithms/shared/compressed/operations.h"
#include "algorithms/shared/flat_reduction.h"
#include "kernels/device_ways.h"
#include "kernels/loops/adam/adam.h"
#include "python_shim/bindings.h"
#include "python_shim/bindings_algorithms.h"

namespace bagua {
namespace {

namespace py = pybind11;

void bindBucketOperations(py::module& module) {
  const auto noGil = py::call_guard<py::gil_scoped_release>();
  module.def(
      "reduce_flat",
      [](const Executors& executors, const at::Tensor& flat, bool hierarchical, bool average, bool isCompressed) {
        return reduceFlat(*executors.provider, flat, isCompressed, {.hierarchical = hierarchical, .average = average});
      },
      py::arg("executors"), py::arg("flat"), py::arg("hierarchical"), py::arg("average"), py::arg("is_compressed"),
      noGil);
}

// bagua.compressed.
void bindCompressed(py::module& module) {
  const auto noGil = py::call_guard<py::gil_scoped_release>();
  module.def(
      "compressed_all_reduce",
      [](const Executors& executors, const at::Tensor& tensor, const std::string& codec, bool average, bool isAwaited) {
        return compressed::submitAllReduce(*executors.provider, tensor, {codec, average, isAwaited});
      },
      py::arg("executors"), py::arg("tensor"), py::arg("codec"), py::arg("average"), py::arg("is_awaited"), noGil);
  module.def(
      "compressed_reduce_scatter",
      // NOLINTNEXTLINE(readability-function-size): what c10d's takes, and the codec.
      [](const Executors& executors, const at::Tensor& output, const at::Tensor& input, const std::string& codec,
         bool average, bool isAwaited) {
        return compressed::submitReduceScatter(*executors.provider, output, input, {codec, average, isAwaited});
      },
      py::arg("executors"), py::arg("output"), py::arg("input"), py::arg("codec"), py::arg("average"),
      py::arg("is_awaited"), noGil);
  module.def(
      "compressed_all_gather",
      [](const Executors& executors, const at::Tensor& output, const at::Tensor& input, const std::string& codec,
         bool isAwaited) {
        return compressed::submitAllGather(*executors.provider, output, input,
                                           {.codec = codec, .average = false, .isAwaited = isAwaited});
      },
      py::arg("executors"), py::arg("output"), py::arg("input"), py::arg("codec"), py::arg("is_awaited"), noGil);
}

// What QAdamOptimizer does on CPUs.
void bindAdam(py::module& module) {
  module.def("adam_takes", &adam::areAlike, py::arg("tensors"));
  module.def(
      "adam_step",
      // NOLINTNEXTLINE(readability-function-size): the operands of the formula.
      [](const at::Tensor& weights, const at::Tensor& momentum, const at::Tensor& variance, const at::Tensor& gradient,
         double size, double correction, double eps) {
        adam::step(weights, momentum, variance, gradient, {.size = size, .correction = correction, .eps = eps});
      },
      py::arg("weights"), py::arg("momentum"), py::arg("variance"), py::arg("gradient"), py::arg("size"),
      py::arg("correction"), py::arg("eps"), py::call_guard<py::gil_scoped_release>());
}

// For tests: AsOnDevice as a context manager.
struct AsOnDeviceBlock {
  std::optional<AsOnDevice> scope;
};

void bindDeviceWays(py::module& module) {
  module.def("works_on_cpu", py::overload_cast<const at::Tensor&>(&worksOnCpu), py::arg("tensor"));
  py::class_<AsOnDeviceBlock>(module, "AsOnDevice")
      .def(py::init<>())
      .def("__enter__", [](AsOnDeviceBlock& self) { self.scope.emplace(); })
      .def("__exit__", [](AsOnDeviceBlock& self, const py::args& /*error*/) { self.scope.reset(); });
}

}  // namespace

void bindOperations(py::module& module) {
  bindBucketOperations(module);
  bindCompressed(module);
  bindAdam(module);
  bindDeviceWays(module);
}

}  // namespace bagua
