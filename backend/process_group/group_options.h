// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "backend/torch_compat.h"

namespace bagua {

inline constexpr const char* kBackendName = "bagua";

// What a user or this package asks of a group: the pg_options of init_process_group and new_group.
struct GroupOptions final : c10d::Backend::Options {
  explicit GroupOptions(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
      : c10d::Backend::Options(kBackendName, timeout) {}
  GroupOptions(const GroupOptions&) = default;

  // CUDA: run communication on a stream of high priority.
  bool highPriorityStream = false;
  // CPU: programs never run together, as makeCpuExecutor has it. Ours, for groups of our own.
  bool isSerial = false;
  // The group has no members, and meets nobody, before reconfigure(). torch's options have this field from 2.14 on.
  bool waitsForReconfigure = false;
  // What the ranks have told each other already (ownRecord()), by another way than the store; empty: they do it there.
  std::vector<std::string> records;
};

}  // namespace bagua
