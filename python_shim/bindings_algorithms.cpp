// SPDX-License-Identifier: Apache-2.0
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "algorithms/comm_hook.h"
#include "algorithms/registry.h"
#include "backend/c10d/backend_executors.h"
#include "backend/process_group_bagua.h"
#include "python_shim/bindings.h"

namespace bagua {
namespace {

namespace py = pybind11;
using OptionValues = std::map<std::string, OptionValue>;
using FuturePtr = std::shared_ptr<torch::jit::PythonFutureWrapper>;

// Exactly the types of an option: pybind11's own casters would take None for False, and any object with __float__.
OptionValues optionValues(const std::string& algorithm, const py::dict& given) {
  OptionValues values;
  for (const auto& [name, value] : given) {
    OptionValue& converted = values[py::cast<std::string>(name)];
    if (py::isinstance<py::bool_>(value)) {
      converted = py::cast<bool>(value);
    } else if (py::isinstance<py::int_>(value)) {
      converted = py::cast<int64_t>(value);
    } else if (py::isinstance<py::float_>(value)) {
      converted = py::cast<double>(value);
    } else if (py::isinstance<py::str>(value)) {
      converted = py::cast<std::string>(value);
    } else {
      throw py::type_error("option '" + py::cast<std::string>(name) + "' of algorithm '" + algorithm +
                           "' takes a bool, int, float or str, got " + py::cast<std::string>(py::repr(value)));
    }
  }
  return values;
}

py::dict statsDict(const HookRunner& hook) {
  const HookStats stats = hook.stats();
  py::dict dict;
  dict["algorithm"] = hook.name();
  dict["steps"] = stats.steps;
  dict["buckets"] = stats.buckets;
  dict["logical_bytes"] = stats.logicalBytes;
  dict["wire_bytes"] = stats.wireBytes;
  dict["seconds"] = stats.seconds;
  return dict;
}

py::dict infoDict(const std::string& name) {
  const auto& info = AlgorithmRegistry::find(name);
  py::list options;
  for (const auto& option : info.options) {
    py::dict entry;
    entry["name"] = option.name;
    entry["default"] = option.defaultValue;
    entry["summary"] = option.summary;
    options.append(entry);
  }
  py::dict dict;
  dict["name"] = info.name;
  dict["summary"] = info.summary;
  dict["needs_optimizer"] = info.needsOptimizer;
  dict["options"] = options;
  return dict;
}

// An opaque object for Python: pybind11 would turn a bare provider into what it really is, the process group.
struct Executors {
  std::shared_ptr<ExecutorProvider> provider;
};

// The executors of a group of ours, kept alive with it.
Executors executorsOfGroup(const c10::intrusive_ptr<ProcessGroupBagua>& group) {
  ProcessGroupBagua* provider = group.get();
  auto release = [owner = c10::intrusive_ptr<ProcessGroupBagua>(group)](ExecutorProvider*) mutable { owner.reset(); };
  return {std::shared_ptr<ExecutorProvider>(provider, std::move(release))};
}

Executors executorsOverBackend(const c10::intrusive_ptr<c10d::Backend>& backend, const std::string& groupName,
                               const std::vector<std::string>& hostIds, std::chrono::milliseconds timeout) {
  return {std::make_shared<BackendExecutors>(backend, groupName, hostIds, timeout)};
}

void bindHook(py::module& module) {
  py::class_<Executors>(module, "Executors");
  module.def("executors_of_group", &executorsOfGroup, py::arg("group"));
  module.def("executors_over_backend", &executorsOverBackend, py::arg("backend"), py::arg("group_name"),
             py::arg("host_ids"), py::arg("timeout"));
  const auto noGil = py::call_guard<py::gil_scoped_release>();
  py::class_<HookRunner, std::shared_ptr<HookRunner>>(module, "Hook")
      .def(py::init([](const std::string& algorithm, const py::dict& options, const Executors& executors) {
             return std::make_shared<HookRunner>(algorithm, optionValues(algorithm, options), executors.provider);
           }),
           py::arg("algorithm"), py::arg("options"), py::arg("executors"))
      .def(
          "run",
          [](HookRunner& self, c10d::GradBucket& bucket) {
            return std::make_shared<torch::jit::PythonFutureWrapper>(self.run(bucket));
          },
          py::arg("bucket"), noGil)
      .def(
          "check_agreement",
          [](HookRunner& self, const std::string& parameters, const std::string& device) {
            self.checkAgreement(parameters, at::Device(device));
          },
          py::arg("parameters"), py::arg("device"), noGil)
      .def("detach", &HookRunner::detach, noGil)
      .def("stats", &statsDict)
      .def_property_readonly("name", &HookRunner::name)
      .def_property_readonly("options", [](const HookRunner& self) { return self.options().values(); });
}

}  // namespace

void bindAlgorithms(py::module& module) {
  bindHook(module);
  module.def("algorithm_names", &AlgorithmRegistry::names);
  module.def("algorithm_info", &infoDict, py::arg("name"));
  module.def(
      "check_options",
      [](const std::string& name, const py::dict& options) {
        return Options(name, AlgorithmRegistry::find(name).options, optionValues(name, options)).values();
      },
      py::arg("name"), py::arg("options"),
      "All options of an algorithm with the defaults filled in. Unknown names are a ValueError that lists the valid "
      "ones, values of a wrong type a TypeError.");
  module.def(
      "register_hook",
      [](c10d::Reducer& reducer, const std::shared_ptr<HookRunner>& hook) {
        reducer.register_comm_hook(std::make_unique<CommHook>(hook));
      },
      py::arg("reducer"), py::arg("hook"));
}

}  // namespace bagua
