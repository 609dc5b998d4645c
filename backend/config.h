// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

// Every environment variable that bagua reads. docs/settings.md lists them.
namespace bagua::config {

// BAGUA_HOST_ID: ranks with different values count as being on different hosts (as NCCL_HOSTID does for NCCL).
std::optional<std::string> hostId();

// BAGUA_SHARED_MEMORY: "0" has CPU tensors go through the network also between the ranks of one host.
bool usesSharedMemory();

// BAGUA_DEFAULT_BUCKET_SIZE: bytes of weights that travel together where an algorithm makes buckets of its own, 10 MiB
// by default. Throws ValueError unless it is a positive number.
int64_t defaultBucketBytes();

// BAGUA_WARN_AFTER_SECONDS: how long an operation may take before a warning names the ranks that it waits for, 30 by
// default; 0: no warnings. Throws ValueError unless it is a number, not negative.
std::chrono::milliseconds warnAfter();

// TORCH_FR_BUFFER_SIZE, TORCH_NCCL_TRACE_BUFFER_SIZE: how many operations the flight recorder keeps, as for torch's
// own; 2000 by default, 0: none.
size_t recordedOperations();

// TORCH_FR_DUMP_ON_TIMEOUT, TORCH_NCCL_DUMP_ON_TIMEOUT: "0" keeps the flight recorder from writing a file when a group
// fails.
bool writesFlightRecorder();

// BAGUA_CHECK_PROGRAMS: "0" saves the message per operation in which ranks on different hosts compare what they are
// about to do.
bool checksPrograms();

}  // namespace bagua::config
