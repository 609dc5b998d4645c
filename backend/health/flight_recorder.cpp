// SPDX-License-Identifier: Apache-2.0
#include "backend/health/flight_recorder.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <sys/syscall.h>
#include <torch/csrc/jit/serialization/pickler.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <mutex>
#include <torch/csrc/distributed/c10d/FlightRecorder.hpp>
#include <utility>

#include "backend/config.h"

namespace bagua {
namespace {

using Dict = c10::Dict<c10::IValue, c10::IValue>;
using List = c10::List<c10::IValue>;

// Of torch's format: see FlightRecorder.hpp.
constexpr const char* kFormatVersion = "2.10";

Dict newDict() { return Dict(c10::AnyType::get(), c10::AnyType::get()); }
List newList() { return List(c10::AnyType::get()); }

int64_t now() {
  const auto sinceEpoch = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(sinceEpoch).count();
}

// What torch's analysis calls the operation.
std::string torchName(const FlightRecorder::Entry& entry) {
  using c10d::OpType;
  using Name = std::pair<OpType, const char*>;
  constexpr auto kNames = std::to_array<Name>({
      {OpType::BROADCAST, "broadcast"},
      {OpType::REDUCE, "reduce"},
      {OpType::ALLREDUCE_COALESCED, "allreduce_coalesced"},
      {OpType::ALLGATHER, "all_gather"},
      {OpType::_ALLGATHER_BASE, "_all_gather_base"},
      {OpType::ALLGATHER_COALESCED, "allgather_coalesced"},
      {OpType::GATHER, "gather"},
      {OpType::SCATTER, "scatter"},
      {OpType::REDUCE_SCATTER, "reduce_scatter"},
      {OpType::_REDUCE_SCATTER_BASE, "_reduce_scatter_base"},
      {OpType::ALLTOALL, "all_to_all"},
      {OpType::ALLTOALL_BASE, "all_to_all"},
      {OpType::BARRIER, "all_reduce_barrier"},
      {OpType::COALESCED, "coalesced"},
  });
  const int rank = entry.group->rank;
  if (entry.type == OpType::SEND) return c10::str("send ", rank, "->", entry.program.peer);
  if (entry.type == OpType::RECV) return c10::str("recv ", rank, "<-", entry.program.peer);
  if (entry.type == OpType::RECVANYSOURCE) return c10::str("recv ", rank, "<-?");
  const auto* const name = std::ranges::find(kNames, entry.type, &Name::first);
  // The programs of hooks are among the others.
  return name == kNames.end() ? "all_reduce" : name->second;
}

bool isMessage(c10d::OpType type) {
  return type == c10d::OpType::SEND || type == c10d::OpType::RECV || type == c10d::OpType::RECVANYSOURCE;
}

// One tensor, flat: operations do not keep shapes.
c10::IValue sizesOf(const ProgramFingerprint& program) {
  List dimensions = newList();
  dimensions.push_back(program.numel);
  List tensors = newList();
  tensors.push_back(dimensions);
  return tensors;
}

c10::IValue dtypesOf(const ProgramFingerprint& program) {
  return std::vector<std::string>{at::toString(static_cast<at::ScalarType>(program.dtype))};
}

Dict dictOf(const FlightRecorder::Entry& entry) {
  Dict dict = newDict();
  dict.insert("frames", newList());
  dict.insert("record_id", static_cast<int64_t>(entry.id));
  dict.insert("pg_id", static_cast<int64_t>(entry.group->id));
  dict.insert("process_group", std::make_tuple(entry.group->name, std::string("undefined")));
  dict.insert("thread_name", "");
  dict.insert("thread_id", std::to_string(entry.thread));
  dict.insert("collective_seq_id", static_cast<int64_t>(entry.program.sequence) + 1);
  dict.insert("p2p_seq_id", static_cast<int64_t>(entry.messages));
  dict.insert("op_id", static_cast<int64_t>(entry.program.sequence + entry.messages));
  dict.insert("profiling_name", "c10d:" + torchName(entry));
  // Ours: the analysis ignores it.
  dict.insert("bagua_operation", describe(entry.program));
  dict.insert("time_created_ns", entry.created);
  dict.insert("input_sizes", sizesOf(entry.program));
  dict.insert("input_dtypes", dtypesOf(entry.program));
  dict.insert("output_sizes", sizesOf(entry.program));
  dict.insert("output_dtypes", dtypesOf(entry.program));
  const bool isCompleted = entry.completed != 0 && !entry.hasFailed;
  dict.insert("state", isCompleted ? "completed" : "started");
  dict.insert("time_discovered_started_ns", entry.created);
  dict.insert("time_discovered_completed_ns", isCompleted ? c10::IValue(entry.completed) : c10::IValue());
  if (isCompleted) dict.insert("duration_ms", static_cast<double>(entry.completed - entry.created) / 1e6);
  dict.insert("retired", entry.completed != 0);
  dict.insert("timeout_ms", entry.timeout);
  dict.insert("is_p2p", isMessage(entry.type));
  return dict;
}

std::string pickled(const c10::IValue& value) {
  std::string bytes;
  torch::jit::Pickler pickler([&](const char* data, size_t size) { bytes.append(data, size); }, nullptr, nullptr,
                              nullptr, nullptr, false);
  pickler.protocol();
  pickler.pushIValue(value);
  pickler.stop();
  return bytes;
}

}  // namespace

FlightRecorder& FlightRecorder::instance() {
  // Never destroyed: threads that outlast the interpreter may still record.
  static auto* const recorder = new FlightRecorder(config::recordedOperations());
  return *recorder;
}

std::shared_ptr<FlightRecorder::Group> FlightRecorder::addGroup(Group group) {
  auto known = std::make_shared<Group>(std::move(group));
  const std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const auto& other) { return other.expired(); });
  known->id = nextGroup_++;
  groups_.push_back(known);
  return known;
}

uint64_t FlightRecorder::begin(const std::shared_ptr<Group>& group, const Operation& operation,
                               const ProgramFingerprint& program) {
  // The kernel is asked once a thread, and not by gettid(), which glibc has from 2.30 on.
  static const thread_local auto kThread = static_cast<uint64_t>(::syscall(SYS_gettid));
  if (capacity_ == 0) return 0;
  const int64_t created = now();
  const std::lock_guard lock(mutex_);
  if (isMessage(operation.type)) ++group->messages;
  Entry entry{.id = next_,
              .group = group,
              .type = operation.type,
              .program = program,
              .messages = group->messages,
              .created = created,
              .timeout = operation.timeout.count(),
              .thread = kThread};
  if (entries_.size() < capacity_) {
    entries_.push_back(std::move(entry));
  } else {
    entries_[next_ % capacity_] = std::move(entry);
  }
  return next_++;
}

void FlightRecorder::end(uint64_t id, bool isSuccess) {
  if (capacity_ == 0) return;
  const int64_t completed = now();
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_[id % capacity_];
  // Overwritten by a later one, as may be.
  if (entry.id != id) return;
  entry.completed = completed;
  entry.hasFailed = !isSuccess;
}

std::string FlightRecorder::dump() const {
  Dict groups = newDict();
  Dict status = newDict();
  List entries = newList();
  {
    const std::lock_guard lock(mutex_);
    for (const auto& known : groups_) {
      const auto group = known.lock();
      if (!group) continue;
      Dict config = newDict();
      config.insert("name", group->name);
      config.insert("desc", "undefined");
      config.insert("ranks", c10::str("[", c10::Join(", ", group->globalRanks), "]"));
      // Of several with one name the latest, as torch has it.
      groups.insert_or_assign(group->name, config);
    }
    const uint64_t first = next_ - entries_.size();
    for (uint64_t id = first; id < next_; ++id) entries.push_back(dictOf(entries_[id % capacity_]));
  }
  Dict all = newDict();
  all.insert("version", kFormatVersion);
  all.insert("pg_config", groups);
  all.insert("pg_status", status);
  all.insert("comm_lib_version", "bagua");
  all.insert("entries", entries);
  return pickled(all);
}

std::string FlightRecorder::write(uint64_t globalRank) const {
  if (capacity_ == 0 || !config::writesFlightRecorder()) return "";
  // torch's writer is one for the process, and made without a lock.
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& writer = c10d::DebugInfoWriter::getWriter(static_cast<int>(globalRank));
  writer.write(dump());
  return writer.getWriterTarget();
}

}  // namespace bagua
