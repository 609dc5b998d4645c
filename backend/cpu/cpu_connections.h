// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "backend/cpu/shared_memory/shared_memory_exchange.h"
#include "backend/cpu/wire.h"
#include "backend/operation/program_fingerprint.h"
#include "backend/topology/topology.h"

namespace bagua {

// What comes from and what goes to every rank, as bytes.
struct RankParts {
  std::vector<at::Tensor> received;
  std::vector<at::Tensor> sent;
};

// What carries the CPU tensors of a group: memory that the ranks of a host share, and a wire between all ranks. Finds
// out which ranks share memory. Used by one thread, but for abort().
class CpuConnections {
 public:
  using Deadline = Wire::Deadline;

  CpuConnections(std::unique_ptr<Wire> wire, std::shared_ptr<const HostTopology> topology);

  // What the calls from now on belong to.
  void setProgram(const ProgramFingerprint& program);
  // Whether connect() has nothing to do: the same on all ranks.
  [[nodiscard]] bool isConnected() const { return hosts_.has_value(); }
  // At the beginning of the first call, on all ranks: shares memory.
  void connect(const ProgramFingerprint& program, Deadline deadline);
  // Has whoever waits for another rank throw. From any thread.
  void abort();

  // The rest needs connect().

  // Ranks that share memory, as hosts.
  [[nodiscard]] const HostTopology& hosts() const { return *hosts_; }
  [[nodiscard]] int ownHost() const { return hosts_->hostOf(wire_->rank()); }
  [[nodiscard]] bool isOneHost() const { return hosts_->hostCount() == 1; }
  // Those that share memory with this rank; only itself where there is no shared memory.
  [[nodiscard]] const std::vector<int>& members() const { return hosts_->ranksOf(ownHost()); }
  // On `host`, who deals with what is `rank`'s: all its members in turn.
  [[nodiscard]] int partnerOn(int host, int rank) const;

  [[nodiscard]] Wire& wire() { return *wire_; }
  // Null where this rank shares memory with no other.
  [[nodiscard]] SharedMemoryExchange* sharedMemory() { return sharedMemory_.get(); }
  // What the members have for each other, of all ranks' parts. There is shared memory.
  void exchangeInHost(const RankParts& parts, Deadline deadline);

 private:
  void shareMemory(const ProgramFingerprint& program, Deadline deadline);
  // What this rank says, of all ranks.
  std::vector<bool> flagsOfAll(bool flag, Deadline deadline);

  const std::unique_ptr<Wire> wire_;
  const std::shared_ptr<const HostTopology> topology_;
  // Empty before the first call.
  std::optional<HostTopology> hosts_;
  // Guards the pointer, which abort() follows from another thread.
  std::mutex mutex_;
  std::unique_ptr<SharedMemoryExchange> sharedMemory_;
};

}  // namespace bagua
