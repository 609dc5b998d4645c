// SPDX-License-Identifier: Apache-2.0
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <future>
#include <limits>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "algorithms/hook/agreement.h"
#include "algorithms/hook/bucket_splitting.h"
#include "algorithms/hook/comm_hook.h"
#include "algorithms/registry.h"
#include "algorithms/shared/bucket_operations.h"
#include "algorithms/shared/compressed/coding.h"
#include "algorithms/shared/compressed/operations.h"
#include "backend/process_group/backend_executors.h"
#include "backend/process_group/process_group_bagua.h"
#include "kernels/closest_names.h"
#include "kernels/codec.h"
#include "kernels/device_ways.h"
#include "kernels/loops/adam/adam.h"
#include "python_shim/bindings.h"

namespace bagua {
namespace {

namespace py = pybind11;
using OptionValues = std::map<std::string, OptionValue>;
using FuturePtr = std::shared_ptr<torch::jit::PythonFutureWrapper>;

// Words as "a, b", a mapping, where it is taken, as "a=b, c=d"; nothing for other values.
std::optional<std::string> textOf(const py::handle& value, bool takesMapping) {
  std::string text;
  const auto append = [&](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  if (takesMapping && py::isinstance<py::dict>(value)) {
    for (const auto& [key, entry] : py::reinterpret_borrow<py::dict>(value)) {
      if (!py::isinstance<py::str>(key) || !py::isinstance<py::str>(entry)) return std::nullopt;
      append(py::cast<std::string>(key) + "=" + py::cast<std::string>(entry));
    }
    return text;
  }
  if (!py::isinstance<py::tuple>(value) && !py::isinstance<py::list>(value)) return std::nullopt;
  for (const auto& entry : py::reinterpret_borrow<py::sequence>(value)) {
    if (!py::isinstance<py::str>(entry)) return std::nullopt;
    append(py::cast<std::string>(entry));
  }
  return text;
}

const OptionInfo& optionOf(const std::string& algorithm, const std::string& name) {
  const auto& options = AlgorithmRegistry::find(algorithm).options;
  const auto found =
      std::find_if(options.begin(), options.end(), [&](const OptionInfo& option) { return option.name == name; });
  TORCH_INTERNAL_ASSERT(found != options.end());
  return *found;
}

// Python's None is an empty string, where that is what an option is by default.
bool takesNone(const OptionInfo& option) { return option.defaultValue == OptionValue(std::string()); }

// Python's integers have no end.
OptionValue wholeNumber(const std::string& algorithm, const OptionInfo& option, const py::handle& value) {
  int overflow = 0;
  const int64_t number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (overflow == 0) return number;
  if (std::holds_alternative<double>(option.defaultValue)) {
    const double rounded = PyLong_AsDouble(value.ptr());
    if (PyErr_Occurred() == nullptr) return rounded;
    PyErr_Clear();
    return std::numeric_limits<double>::infinity();
  }
  using Limits = std::numeric_limits<int64_t>;
  throw py::value_error("option '" + option.name + "' of algorithm '" + algorithm + "' takes whole numbers from " +
                        std::to_string(Limits::min()) + " to " + std::to_string(Limits::max()) + ", got one of " +
                        py::cast<std::string>(py::str(value.attr("bit_length")())) + " bits");
}

py::dict pythonValues(const std::string& algorithm, const OptionValues& values) {
  py::dict dict;
  for (const auto& [name, value] : values) {
    const bool isNone = value == OptionValue(std::string()) && takesNone(optionOf(algorithm, name));
    dict[py::str(name)] = isNone ? py::none() : py::cast(value);
  }
  return dict;
}

// Exactly the types of an option: pybind11's own casters would take None for False, and any object with __float__.
// Names come first: the value of one that does not exist may be anything. `others` as for checkOptionName().
OptionValues optionValues(const std::string& algorithm, const py::dict& given,
                          const std::vector<std::string>& others = {}) {
  const auto& declared = AlgorithmRegistry::find(algorithm).options;
  for (const auto& [name, value] : given) checkOptionName(algorithm, declared, py::cast<std::string>(name), others);
  OptionValues values;
  for (const auto& [name, value] : given) {
    const OptionInfo& option = optionOf(algorithm, py::cast<std::string>(name));
    OptionValue& converted = values[option.name];
    if (py::isinstance<py::bool_>(value)) {
      converted = py::cast<bool>(value);
    } else if (py::isinstance<py::int_>(value)) {
      converted = wholeNumber(algorithm, option, value);
    } else if (py::isinstance<py::float_>(value)) {
      converted = py::cast<double>(value);
    } else if (py::isinstance<py::str>(value)) {
      converted = py::cast<std::string>(value);
    } else if (const auto text = textOf(value, option.takesMapping)) {
      converted = *text;
    } else if (value.is_none() && takesNone(option)) {
      converted = std::string();
    } else {
      const bool isMapping = !option.takesMapping && py::isinstance<py::dict>(value);
      throw py::type_error("option '" + option.name + "' of algorithm '" + algorithm + "' takes " +
                           (isMapping ? "no mapping" : "a bool, int, float or str") + ", got " +
                           py::cast<std::string>(py::repr(value)));
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
  dict["rounds"] = stats.rounds;
  dict["logical_bytes"] = stats.logicalBytes;
  dict["wire_bytes"] = stats.traffic.sentBytes();
  dict["wire_bytes_in_host"] = stats.traffic.inHostBytes;
  dict["wire_bytes_between_hosts"] = stats.traffic.betweenHostsBytes;
  dict["state_bytes"] = stats.stateBytes;
  dict["seconds"] = stats.seconds;
  dict["memory"] = stats.memory;
  return dict;
}

py::dict infoDict(const std::string& name) {
  const auto& info = AlgorithmRegistry::find(name);
  py::list options;
  for (const auto& option : info.options) {
    py::dict entry;
    entry["name"] = option.name;
    entry["default"] = takesNone(option) ? py::none() : py::cast(option.defaultValue);
    entry["summary"] = option.summary;
    options.append(entry);
  }
  py::dict dict;
  dict["name"] = info.name;
  dict["summary"] = info.summary;
  dict["optimizer"] = info.optimizer;
  dict["runs_in_background"] = info.runsInBackground;
  dict["steps_may_differ"] = info.stepsMayDiffer;
  dict["is_exact"] = info.agreement == Agreement::kIdentical;
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
  auto release = [owner = c10::intrusive_ptr<ProcessGroupBagua>(group)](ExecutorProvider*) mutable {
    withoutGil([&owner] { owner.reset(); });
  };
  return {std::shared_ptr<ExecutorProvider>(provider, std::move(release))};
}

// Of this process. Guarded by the GIL.
std::vector<std::weak_ptr<BackendExecutors>>& executorsOverBackends() {
  static std::vector<std::weak_ptr<BackendExecutors>> known;
  return known;
}

Executors executorsOverBackend(const c10::intrusive_ptr<c10d::Backend>& backend, const std::string& groupName,
                               const std::vector<std::string>& records, std::chrono::milliseconds timeout,
                               const std::vector<uint64_t>& globalRanks) {
  const std::shared_ptr<BackendExecutors> made(
      new BackendExecutors(backend, groupName, records, timeout, globalRanks),
      [](BackendExecutors* executors) { withoutGil([=] { delete executors; }); });
  auto& known = executorsOverBackends();
  std::erase_if(known, [](const auto& executors) { return executors.expired(); });
  known.push_back(made);
  return {made};
}

// With the groups all executors over backends: a hook keeps them, also where the script has destroyed all groups. At
// the same time, as each may take its while to give up what nobody answers.
void shutDownTogether(const std::vector<c10::intrusive_ptr<ProcessGroupBagua>>& groups) {
  // A copy: another thread may make some meanwhile.
  const auto left = executorsOverBackends();
  withoutGil([&] {
    std::vector<std::future<void>> ends;
    for (const auto& group : groups) ends.push_back(std::async(std::launch::async, [&group] { group->shutdown(); }));
    for (const auto& known : left) {
      if (auto executors = known.lock()) {
        ends.push_back(std::async(std::launch::async, [kept = std::move(executors)] { kept->shutdown(); }));
      }
    }
    for (auto& end : ends) end.get();
  });
}

// The same executors, with which a Python object ends: their group, where it was made for them alone.
Executors withOwned(const Executors& executors, py::object owned) {
  auto* kept = new py::object(std::move(owned));
  auto release = [provider = executors.provider, kept](ExecutorProvider*) mutable {
    provider.reset();
    // After the interpreter's end there is nothing to drop it with.
    if (Py_IsInitialized() == 0) return;
    const py::gil_scoped_acquire gil;
    delete kept;
  };
  return {std::shared_ptr<ExecutorProvider>(executors.provider.get(), std::move(release))};
}

void bindBucketOperations(py::module& module) {
  const auto noGil = py::call_guard<py::gil_scoped_release>();
  module.def(
      "reduce_flat",
      [](const Executors& executors, const at::Tensor& flat, bool hierarchical, bool average, bool isCompressed) {
        return bucket_operations::reduce(*executors.provider, flat, isCompressed,
                                         {.hierarchical = hierarchical, .average = average});
      },
      py::arg("executors"), py::arg("flat"), py::arg("hierarchical"), py::arg("average"), py::arg("is_compressed"),
      noGil);
  module.def(
      "average_peers",
      [](const Executors& executors, const at::Tensor& flat, int64_t exchange, bool hierarchical,
         const std::string& mode) {
        return bucket_operations::averagePeers(*executors.provider, flat, exchange, hierarchical, mode);
      },
      py::arg("executors"), py::arg("flat"), py::arg("exchange"), py::arg("hierarchical"), py::arg("mode"), noGil);
  module.def(
      "exchange_in_ring",
      [](const Executors& executors, const at::Tensor& flat, const at::Tensor& self, const at::Tensor& left,
         const at::Tensor& right, bool hierarchical) {
        return bucket_operations::exchangeInRing(*executors.provider, flat, {self, left, right}, hierarchical);
      },
      py::arg("executors"), py::arg("flat"), py::arg("self"), py::arg("left"), py::arg("right"),
      py::arg("hierarchical"), noGil);
  py::class_<AverageRound, std::shared_ptr<AverageRound>>(module, "AverageRound")
      .def(py::init([](const Executors& executors, const at::Tensor& flat, bool wantsToEnd) {
             return bucket_operations::startAverageRound(*executors.provider, flat, wantsToEnd);
           }),
           py::arg("executors"), py::arg("flat"), py::arg("wants_to_end"), noGil)
      .def(
          "wait", [](const AverageRound& self) { return self.wait(); }, noGil)
      .def(
          "take_change", [](AverageRound& self) { return self.takeChange(0); }, noGil);
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

using HookClass = py::class_<HookRunner, std::shared_ptr<HookRunner>>;

// What the user's handle asks for.
void bindControl(HookClass& hook) {
  const auto noGil = py::call_guard<py::gil_scoped_release>();
  hook.def("after_step", &HookRunner::afterStep, noGil)
      .def("at_backward", &HookRunner::atBackward, py::arg("is_bypassed"), noGil)
      .def("synchronize", &HookRunner::synchronize, noGil)
      .def("abort", &HookRunner::abort, noGil)
      .def("resume", &HookRunner::resume, noGil)
      .def("end_within", &HookRunner::endWithin, py::arg("limit"), noGil)
      .def("after_forward", &HookRunner::afterForward, py::arg("outputs"), noGil)
      .def("count_skipped_step", &HookRunner::countSkippedStep, noGil)
      .def_property_readonly("is_before_step", &HookRunner::isBeforeStep)
      .def(
          "leave",
          [](HookRunner& self, const std::string& moment, const std::string& shapes,
             const std::vector<at::Tensor>& state, const std::vector<at::Tensor>& gradients) {
            self.leave({.moment = moment, .shapes = shapes, .state = state, .gradients = gradients});
          },
          py::arg("moment"), py::arg("shapes"), py::arg("state"), py::arg("gradients"), noGil)
      .def("state", &HookRunner::state, noGil)
      .def("layout", &HookRunner::layout)
      .def("step", &HookRunner::step)
      .def("load", &HookRunner::load, py::arg("state"), py::arg("layout"), py::arg("step"), noGil)
      .def("rescale", &HookRunner::rescale, py::arg("factor"), noGil)
      .def_property_readonly("keeps_residuals", &HookRunner::keepsResiduals)
      .def("stats", &statsDict)
      .def("reset_stats", &HookRunner::resetStats)
      .def_property_readonly("why_uncoded", &HookRunner::whyUncoded)
      .def_property_readonly("name", &HookRunner::name)
      .def_property_readonly("wants_small_buckets", &HookRunner::wantsSmallBuckets)
      .def_property_readonly("host_ranks", &HookRunner::hostRanks)
      .def_property_readonly("reduces_gradients", &HookRunner::reducesGradients)
      .def_property_readonly("options",
                             [](const HookRunner& self) { return pythonValues(self.name(), self.options().values()); });
}

void bindHook(py::module& module) {
  py::class_<Executors>(module, "Executors");
  module.def("executors_of_group", &executorsOfGroup, py::arg("group"));
  module.def("executors_over_backend", &executorsOverBackend, py::arg("backend"), py::arg("group_name"),
             py::arg("records"), py::arg("timeout"), py::arg("global_ranks"));
  module.def("shut_down_together", &shutDownTogether, py::arg("groups"));
  module.def("with_owned", &withOwned, py::arg("executors"), py::arg("owned"));
  const auto noGil = py::call_guard<py::gil_scoped_release>();
  HookClass hook(module, "Hook");
  hook.def(py::init([](const std::string& algorithm, const py::dict& options, const Executors& executors,
                       std::vector<at::Tensor> parameters, bool isStaticGraph) {
             return std::make_shared<HookRunner>(algorithm, optionValues(algorithm, options), executors.provider,
                                                 std::move(parameters), isStaticGraph);
           }),
           py::arg("algorithm"), py::arg("options"), py::arg("executors"),
           py::arg("parameters") = std::vector<at::Tensor>(), py::arg("is_static_graph") = false)
      .def(
          "use_host", [](HookRunner& self, const Executors& executors) { self.useHost(executors.provider); },
          py::arg("executors"), noGil)
      .def("use_model", &HookRunner::useModel, py::arg("layers"), py::arg("buffers"), noGil)
      .def("watch_use", &HookRunner::watchUse)
      .def(
          "use_parameters",
          [](HookRunner& self, const std::vector<std::pair<std::string, std::string>>& namesAndRoles) {
            std::vector<ParameterFacts> facts;
            facts.reserve(namesAndRoles.size());
            for (const auto& [name, role] : namesAndRoles) facts.push_back({name, role});
            self.useParameters(facts);
          },
          py::arg("names_and_roles"))
      .def(
          "use_background",
          [](HookRunner& self, const Executors& executors) { self.useBackground(executors.provider); },
          py::arg("executors"), noGil)
      .def(
          "run",
          [](HookRunner& self, c10d::GradBucket& bucket) {
            return std::make_shared<torch::jit::PythonFutureWrapper>(self.run(bucket));
          },
          py::arg("bucket"), noGil)
      .def(
          "reduce_bucket",
          [](HookRunner& self, const at::Tensor& flat, const std::vector<std::pair<int64_t, at::Tensor>>& gradients,
             bool isFirst, bool isLast) {
            std::vector<BucketEntry> entries;
            entries.reserve(gradients.size());
            for (const auto& [parameter, gradient] : gradients) entries.push_back({parameter, gradient});
            return self.reduceBucket(flat, entries, isFirst, isLast);
          },
          py::arg("flat"), py::arg("gradients"), py::arg("is_first"), py::arg("is_last"), noGil)
      .def("after_backward", &HookRunner::afterBackward, noGil)
      .def(
          "agree",
          [](HookRunner& self, const Executors& executors, const std::string& parameters, const std::string& optimizer,
             const std::string& device, const std::string& arithmetic) {
            const std::string use = self.watchesUse() ? " with find_unused_parameters or static_graph" : "";
            const std::string own = self.name() + "(" + self.options().toString() + ")" + use + optimizer;
            agreeOn({own, parameters}, kOfRegistration, *executors.provider, at::Device(device));
            if (AlgorithmRegistry::find(self.name()).needsLikeDevices && !arithmetic.empty()) {
              agreeOn({arithmetic, ""}, kOfArithmetic, *executors.provider, at::Device(device));
            }
            self.useTopology();
          },
          py::arg("executors"), py::arg("parameters"), py::arg("optimizer"), py::arg("device"),
          py::arg("arithmetic") = "", noGil)
      .def(
          "before_forward",
          [](HookRunner& self, std::vector<std::pair<at::Tensor, double>> given) {
            std::vector<Momentum> momenta;
            momenta.reserve(given.size());
            for (auto& [value, decay] : given) momenta.push_back({std::move(value), decay});
            self.beforeForward(std::move(momenta));
          },
          py::arg("momenta"), noGil);
  bindControl(hook);
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

void bindAlgorithms(py::module& module) {
  bindHook(module);
  py::class_<HookPlace, std::shared_ptr<HookPlace>>(module, "HookPlace")
      .def(
          "take_over", [](HookPlace& self, const std::shared_ptr<HookRunner>& hook) { self.runner = hook; },
          py::arg("hook"), "Between two steps: from the next bucket on this hook runs.");
  bindAdam(module);
  bindDeviceWays(module);
  bindBucketOperations(module);
  bindCompressed(module);
  module.def("algorithm_names", &AlgorithmRegistry::names);
  module.def("algorithm_info", &infoDict, py::arg("name"));
  module.def("codec_names", &CodecRegistry::names);
  module.attr("DEFAULT_CODEC") = compressed::kDefaultCodec;
  module.def(
      "check_options",
      [](const std::string& name, const py::dict& options, const std::vector<std::string>& others) {
        const auto& info = AlgorithmRegistry::find(name);
        const Options complete(name, info.options, optionValues(name, options, others));
        // Its constructor knows which values there are.
        static_cast<void>(info.create(complete));
        return pythonValues(name, complete.values());
      },
      py::arg("name"), py::arg("options"), py::arg("other_names") = std::vector<std::string>(),
      "All options of an algorithm with the defaults filled in. Unknown names are a ValueError that lists the valid "
      "ones and suggests one of them, or of other_names, which the caller takes besides; so are values out of range. "
      "Values of a wrong type are a TypeError.");
  module.def(
      "check_names",
      [](const std::string& name, const py::dict& options, const std::optional<std::vector<std::string>>& names) {
        const auto& info = AlgorithmRegistry::find(name);
        info.create(Options(name, info.options, optionValues(name, options)))->checkNames(names);
      },
      py::arg("name"), py::arg("options"), py::arg("names"),
      "ValueError where an option names what is none of the model's parameters, or, for names=None, where it needs a "
      "model.");
  module.def("suggestion_for", &suggestionFor, py::arg("name"), py::arg("known"),
             "\" (did you mean 'bytegrad'?)\", or nothing.");
  module.def(
      "refuse_registration",
      [](const Executors& executors, const std::string& device) {
        agreeOn({}, kOfRegistration, *executors.provider, at::Device(device));
      },
      py::arg("executors"), py::arg("device"), py::call_guard<py::gil_scoped_release>(),
      "Tells the ranks that are in Hook.agree() that this one will not register anything.");
  module.def(
      "register_hook",
      [](c10d::Reducer& reducer, const std::shared_ptr<HookRunner>& hook) {
        auto place = std::make_shared<HookPlace>(hook);
        reducer.register_comm_hook(std::make_unique<CommHook>(place));
        return place;
      },
      py::arg("reducer"), py::arg("hook"), "Returns the place where another hook can take over later.");
  module.def("split_buckets", &splitBuckets, py::arg("reducer"), py::arg("logger"), py::arg("parameters"),
             py::arg("most_bytes"), "Cuts DDP's buckets into smaller ones, between two steps.");
}

}  // namespace bagua
