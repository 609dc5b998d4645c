// SPDX-License-Identifier: Apache-2.0
#include "python_shim/bindings_algorithms.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <future>
#include <string>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "algorithms/hook/agreement.h"
#include "algorithms/hook/bucket_splitting.h"
#include "algorithms/hook/comm_hook.h"
#include "algorithms/registry.h"
#include "backend/net/link.h"
#include "backend/process_group/backend_executors.h"
#include "backend/process_group/process_group_bagua.h"
#include "python_shim/bindings.h"

namespace bagua {
namespace {

namespace py = pybind11;

// The keys are those of bagua._stats.GuardStats.
py::dict guardDict(const Guard::Report& report) {
  using Measure = Guard::Measure;
  py::dict dict;
  dict["looks"] = report.looks;
  dict["alarms"] = report.alarms;
  dict["coding_loss"] = report.worst[static_cast<int>(Measure::kCoding)];
  dict["error_of_mean"] = report.worst[static_cast<int>(Measure::kMean)];
  dict["held_back"] = report.worst[static_cast<int>(Measure::kResidual)];
  dict["raised"] = report.raised;
  return dict;
}

// The keys are those of bagua._stats.Stats.
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
  dict["reconnections"] = net::reconnections().load();
  dict["guard"] = guardDict(stats.guard);
  dict["chosen"] = stats.chosen;
  return dict;
}

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

// By the positions of their parameters.
using Gradients = std::vector<std::pair<int64_t, at::Tensor>>;

std::vector<BucketEntry> entriesOf(const Gradients& gradients) {
  std::vector<BucketEntry> entries;
  entries.reserve(gradients.size());
  for (const auto& [parameter, gradient] : gradients) entries.push_back({parameter, gradient});
  return entries;
}

using HookClass = py::class_<HookRunner, std::shared_ptr<HookRunner>>;

// What the user's handle asks for.
void bindControl(HookClass& hook) {
  const auto noGil = py::call_guard<py::gil_scoped_release>();
  hook.def("after_step", &HookRunner::afterStep, noGil)
      .def("at_backward", &HookRunner::atBackward, py::arg("is_bypassed"), noGil)
      .def("synchronize", &HookRunner::synchronize, noGil)
      .def_property_readonly("have_members_changed", &HookRunner::haveMembersChanged)
      .def("meet_again", &HookRunner::meetAgain, noGil)
      .def("shared", &HookRunner::shared, noGil)
      .def("begin_again", &HookRunner::beginAgain, py::arg("shared"), noGil)
      .def("end_change", &HookRunner::endChange)
      .def("abort_own_groups", &HookRunner::abortOwnGroups, noGil)
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
      .def("guard_table", &HookRunner::guardTable, noGil)
      .def(
          "load",
          [](HookRunner& self, const AlgorithmState& state, BucketLayout layout, int64_t step,
             const std::optional<at::Tensor>& guard) {
            self.load(state, std::move(layout), step, guard.value_or(at::Tensor()));
          },
          py::arg("state"), py::arg("layout"), py::arg("step"), py::arg("guard"), noGil)
      .def("rescale", &HookRunner::rescale, py::arg("factor"), noGil)
      .def_property_readonly("keeps_residuals", &HookRunner::keepsResiduals)
      .def_property_readonly("can_reduce_to_parts", &HookRunner::canReduceToParts)
      .def("wait_for_programs", &HookRunner::waitForPrograms, py::arg("limit"), noGil)
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

void bindSteps(HookClass& hook) {
  const auto noGil = py::call_guard<py::gil_scoped_release>();
  hook.def(
          "run",
          [](HookRunner& self, c10d::GradBucket& bucket) {
            return std::make_shared<torch::jit::PythonFutureWrapper>(self.run(bucket));
          },
          py::arg("bucket"), noGil)
      .def(
          "reduce_bucket",
          [](HookRunner& self, const at::Tensor& flat, const Gradients& gradients, bool isFirst, bool isLast) {
            return self.reduceBucket(flat, entriesOf(gradients), isFirst, isLast);
          },
          py::arg("flat"), py::arg("gradients"), py::arg("is_first"), py::arg("is_last"), noGil)
      .def(
          "reduce_to_parts",
          [](HookRunner& self, const at::Tensor& flat, const at::Tensor& own, const Gradients& gradients,
             bool isFirst) { return self.reduceToParts(flat, own, entriesOf(gradients), isFirst); },
          py::arg("flat"), py::arg("own"), py::arg("gradients"), py::arg("is_first"), noGil)
      .def(
          "pass_over",
          [](HookRunner& self, const at::Tensor& flat, const Gradients& gradients, bool isInParts) {
            return self.passOver(flat, entriesOf(gradients), isInParts);
          },
          py::arg("flat"), py::arg("gradients"), py::arg("is_in_parts"), noGil)
      .def("end_step", &HookRunner::endStep, noGil)
      .def("after_backward", &HookRunner::afterBackward, noGil)
      .def(
          "agree",
          [](HookRunner& self, const std::string& parameters, const std::string& optimizer, const std::string& device,
             const std::string& arithmetic) { self.agree(parameters, optimizer, at::Device(device), arithmetic); },
          py::arg("parameters"), py::arg("optimizer"), py::arg("device"), py::arg("arithmetic") = "", noGil)
      .def(
          "before_forward",
          [](HookRunner& self, std::vector<std::pair<at::Tensor, double>> given) {
            std::vector<Momentum> momenta;
            momenta.reserve(given.size());
            for (auto& [value, decay] : given) momenta.push_back({std::move(value), decay});
            self.beforeForward(std::move(momenta));
          },
          py::arg("momenta"), noGil);
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
      .def(
          "use_shards", [](HookRunner& self, const Executors& executors) { self.useShards(executors.provider); },
          py::arg("executors"), noGil)
      .def("use_model", &HookRunner::useModel, py::arg("layers"), py::arg("buffers"), noGil)
      .def("watch_use", &HookRunner::watchUse)
      .def("use_optimizer", &HookRunner::useOptimizer, py::arg("is_linear"))
      .def(
          "use_parameters",
          [](HookRunner& self, const std::vector<std::pair<std::string, std::string>>& namesAndRoles,
             const std::vector<int64_t>& elements) {
            std::vector<ParameterFacts> facts;
            facts.reserve(namesAndRoles.size());
            for (const auto& [name, role] : namesAndRoles) facts.push_back({.name = name, .role = role});
            for (size_t i = 0; i < elements.size(); ++i) facts.at(i).elements = elements[i];
            self.useParameters(facts);
          },
          py::arg("names_and_roles"), py::arg("elements") = std::vector<int64_t>(),
          "`elements`: of the whole parameters, where parts of gradients travel.")
      .def(
          "use_background",
          [](HookRunner& self, const Executors& executors) { self.useBackground(executors.provider); },
          py::arg("executors"), noGil);
  bindSteps(hook);
  bindControl(hook);
}

}  // namespace

void bindAlgorithms(py::module& module) {
  bindHook(module);
  py::class_<HookPlace, std::shared_ptr<HookPlace>>(module, "HookPlace")
      .def(
          "take_over", [](HookPlace& self, const std::shared_ptr<HookRunner>& hook) { self.runner = hook; },
          py::arg("hook"), "Between two steps: from the next bucket on this hook runs.");
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
  module.def(
      "count_reduced",
      [](c10d::Logger& logger) {
        size_t count = 0;
        for (const auto& bucket : logger.get_per_bucket_variable_indices()) count += bucket.size();
        return count;
      },
      py::arg("logger"), "Returns how many parameters DDP reduces.");
  module.def("split_buckets", &splitBuckets, py::arg("reducer"), py::arg("logger"), py::arg("parameters"),
             py::arg("most_bytes"), "Cuts DDP's buckets into smaller ones, between two steps.");
  module.def("lay_out_buckets", &layOutBuckets, py::arg("reducer"), py::arg("layout"), py::arg("count"),
             "Has DDP's buckets hold what another rank's hold, between two steps.");
  module.def("settle_buckets", &settleBuckets, py::arg("reducer"), py::call_guard<py::gil_scoped_release>(),
             "Has DDP build its final buckets without a backward; False where they stay as they are.");
  module.def("forget_backward", &forgetBackward, py::arg("reducer"),
             "Drops what DDP has noted of a backward that has failed.");
}

}  // namespace bagua
