// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

// Every environment variable that bagua reads. The README lists them.
namespace bagua::config {

// BAGUA_HOST_ID: ranks with different values count as being on different hosts (as NCCL_HOSTID does for NCCL).
std::optional<std::string> hostId();

// BAGUA_SHARED_MEMORY: "0" has CPU tensors go through the network also between the ranks of one host.
bool usesSharedMemory();

// BAGUA_DEFAULT_BUCKET_SIZE: bytes of weights that travel together where an algorithm makes buckets of its own, 10 MiB
// by default. Throws ValueError unless it is a positive number.
int64_t defaultBucketBytes();

}  // namespace bagua::config
