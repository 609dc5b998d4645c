// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// Every environment variable that bagua reads. docs/settings.md lists them. One that changes what travels between ranks
// is read once in a process and has a field in rank_record.cpp, so that what ranks compare is what they use.
namespace bagua::config {

// Returns those that begin with BAGUA_. A user who sets another one is warned by python_shim/bagua/_settings.py.
std::vector<std::string> names();

// BAGUA_HOST_ID: ranks with different values count as being on different hosts (as NCCL_HOSTID does for NCCL).
std::optional<std::string> hostId();

// BAGUA_SOCKET_IFNAME, else the first of GLOO_SOCKET_IFNAME, which may name several: the network interface for CPU
// tensors.
std::optional<std::string> socketInterface();

// MASTER_ADDR, torch's: it tells the network between hosts.
std::optional<std::string> masterAddress();

// BAGUA_SOCKET_CONNECTIONS: the most connections to a process on another host, 32 by default. Throws ValueError unless
// it is a number from 1 to 64.
int socketConnections();

// BAGUA_PORT: where this process listens for CPU tensors from other processes, and for members of a group that changes:
// a port or a range of ports such as 29500-29599, both ends included. By default (0 to 0) the system chooses. Throws
// ValueError for anything else.
struct PortRange {
  uint16_t first = 0;
  uint16_t last = 0;
};
PortRange ports();

// BAGUA_NCCL_CHANNELS: how many NCCL communicators the programs of a group on several hosts take in turns: 1, by
// default, or 2. Throws ValueError for anything else.
int ncclChannels();

// BAGUA_NCCL_NET: "1" has NCCL send between hosts over our own transport, "0" leaves that to NCCL; none where it is not
// set. Throws ValueError for anything else.
std::optional<bool> ncclNet();

// BAGUA_JOB_SECRET, or what is in the file that BAGUA_JOB_SECRET_FILE names, without the end of its last line: what the
// ranks of a job know and nobody else; none where neither is set. Throws ValueError where both are set, one is set but
// empty, the file cannot be read, or the secret is shorter than kShortestSecret. The caller overwrites it.
inline constexpr size_t kShortestSecret = 16;
std::optional<std::string> jobSecret();

// BAGUA_TLS_CERTIFICATE, BAGUA_TLS_KEY and BAGUA_TLS_CA: files in PEM format, for connections between processes. Throws
// ValueError where only some of them are set.
struct TlsFiles {
  std::string certificate;
  std::string key;
  std::string authority;
};
std::optional<TlsFiles> tlsFiles();

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

}  // namespace bagua::config
