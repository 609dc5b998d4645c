// SPDX-License-Identifier: Apache-2.0
#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "backend/config.h"
#include "backend/health/flight_recorder.h"
#include "backend/operation/timeouts.h"
#include "backend/os/local_address.h"
#include "backend/process_group/backend_executors.h"
#include "backend/process_group/process_group_bagua.h"
#include "backend/rendezvous/rank_record.h"
#include "backend/security/job_security.h"
#include "backend/security/sealed_store.h"
#include "backend/topology/topology.h"
#include "python_shim/bindings.h"

namespace bagua {
namespace {

namespace py = pybind11;
using GroupOptions = ProcessGroupBagua::Options;

std::string optionsText(const GroupOptions& options) {
  return c10::str("bagua.Options(timeout=", options.timeout.count(),
                  " ms, is_high_priority_stream=", options.highPriorityStream ? "True" : "False", ")");
}

c10::intrusive_ptr<GroupOptions> copyOf(const GroupOptions& options) {
  return c10::make_intrusive<GroupOptions>(options);
}

void bindOptions(py::module& module) {
  py::class_<GroupOptions, c10d::Backend::Options, c10::intrusive_ptr<GroupOptions>>(
      module, "Options", "Options of a process group of backend 'bagua': pass them as pg_options.")
      // No timeout: that of init_process_group and new_group always wins.
      .def(py::init([](bool isHighPriorityStream) {
             auto options = c10::make_intrusive<GroupOptions>();
             options->highPriorityStream = isHighPriorityStream;
             return options;
           }),
           py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &GroupOptions::highPriorityStream,
                     "CUDA: run communication on a stream of high priority.")
      .def_readwrite("_is_serial", &GroupOptions::isSerial)
      .def_readwrite("_waits_for_reconfigure", &GroupOptions::waitsForReconfigure)
      .def_readwrite("_records", &GroupOptions::records)
      .def("__copy__", &copyOf)
      .def("__deepcopy__", [](const GroupOptions& options, const py::dict&) { return copyOf(options); })
      .def("__repr__", &optionsText);
}

c10::intrusive_ptr<ProcessGroupBagua> createGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                  const c10::intrusive_ptr<GroupOptions>& options) {
  // It waits for the other ranks, which may be threads of this process.
  const py::gil_scoped_release noGil;
  return c10::make_intrusive<ProcessGroupBagua>(store, rank, size, options);
}

c10::intrusive_ptr<c10d::Store> freshPart(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                          std::chrono::milliseconds timeout) {
  const py::gil_scoped_acquire gil;
  const auto fresh = py::module_::import("bagua._fresh_store").attr("fresh_part");
  return fresh(store, rank, size, timeout).cast<c10::intrusive_ptr<c10d::Store>>();
}

void bindProcessGroup(py::module& module) {
  py::class_<ProcessGroupBagua, c10d::Backend, DroppedWithoutGil<ProcessGroupBagua>>(
      module, "ProcessGroupBagua", "The c10d backend 'bagua' of one process group.")
      .def(py::init(&createGroup), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"))
      // The base class has none at run time in every supported torch; split_group and new_group read it.
      .def_property_readonly("options", &ProcessGroupBagua::liveOptions)
      .def_property_readonly("epoch", &ProcessGroupBagua::epoch, "Another number once the group has other members.")
      .def_property_readonly("reconfigured_store", &ProcessGroupBagua::reconfiguredStore,
                             "Where the members since the last reconfigure have met; None before the first one.")
      // In the place of the base class's.
      .def("shrink", &ProcessGroupBagua::shrinkTo, py::arg("ranks_to_exclude"), py::arg("shrink_flags") = 0,
           py::arg("opts_override") = nullptr, py::call_guard<py::gil_scoped_release>())
      // torch calls this on the ranks that are left out of a split. Ours needs nothing of them.
      .def(
          "perform_nocolor_split", [](ProcessGroupBagua&, const at::Device&) {}, py::arg("device"));
}

}  // namespace

void bindBackend(py::module& module) {
  bindOptions(module);
  bindProcessGroup(module);
  ProcessGroupBagua::useMeeting(&freshPart);
  module.def(
      "flight_recorder_trace", [] { return py::bytes(FlightRecorder::instance().dump()); },
      "The last operations of this process, pickled as torch's flight recorder does.");
  module.attr("LONGEST_TIMEOUT") = py::cast(kLongestTimeout);
  module.def("setting_names", &config::names, "The environment variables that begin with BAGUA_ and that are read.");
  module.def("local_host_id", &localHostId, "What identifies this process's host to its peers.");
  module.def("local_address", &net::localAddress, "Where processes of other hosts can reach this one.");
  module.def(
      "listening_ports",
      [] {
        const auto range = config::ports();
        return std::pair(range.first, range.last);
      },
      "The first and the last port where this process may listen; (0, 0): the system chooses one.");
  module.def("sealed_store", &sealedStore, py::arg("store"),
             "The store as the ranks of this job are to use it: sealed where the job has a secret, else as it is.");
  module.def(
      "job_secret_fingerprint",
      [] {
        const auto security = jobSecurity();
        return security ? security->fingerprint() : std::string();
      },
      "Tells job secrets apart; empty where this process has none.");
  module.def("own_record", &ownRecord, "What this process tells the other ranks of a new group.");
}

}  // namespace bagua
