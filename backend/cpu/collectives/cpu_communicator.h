// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "backend/communicator.h"
#include "backend/cpu/collectives/part_owners.h"
#include "backend/cpu/cpu_connections.h"
#include "backend/topology/host_lanes.h"

namespace bagua {

// CPU tensors. Ranks of one host exchange them through shared memory, found at the first call, hosts over a wire that
// only moves bytes (see CpuConnections). Each collective has a source of its own, with its steps in a host and between
// hosts; in_host.cpp has the steps in a host that several share. With both, each byte crosses the network once per
// host: the ranks of a host first reduce among themselves, every one a lane (see HostLanes), exchange their lanes with
// the other hosts (see PartOwners), and share the result.
//
// Reductions are done here, in rank order inside a host, then in the order of hosts, half by half where they are many
// (reduction::reduceHosts), with 16-bit floats accumulated in 32 bits. The result is the same bits on every rank and
// every run, for every dtype and operation. An allreduce of N bytes between h hosts takes what is faster (AgreedLine):
// log h rounds, or fewer, of a message of N bytes from each to some (Halves); or an all-to-all of N (h-1)/h, reduction
// of the own part while other parts arrive, and an all-gather of N (h-1)/h.
class CpuCommunicator final : public Communicator {
 public:
  CpuCommunicator(std::unique_ptr<Wire> wire, const std::shared_ptr<const HostTopology>& topology);

  void broadcast(at::Tensor& tensor, int root) override;
  void allReduce(at::Tensor& tensor, const ReduceOp& op) override;
  void reduce(at::Tensor& tensor, int root, const ReduceOp& op) override;
  void allGather(at::Tensor& output, const at::Tensor& input) override;
  void reduceScatter(at::Tensor& output, const at::Tensor& input, const ReduceOp& op) override;
  void allToAll(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                const Splits& inputSplits) override;
  void reduceScatterInHost(at::Tensor& flat, const Splits& parts, int64_t divisor) override;
  void allGatherInHost(at::Tensor& flat, const Splits& parts) override;
  void allGatherInPieces(at::Tensor& output, const at::Tensor& input, const Pipeline& pipeline) override;
  void allToAllInPieces(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                        const Splits& inputSplits, const Pipeline& pipeline) override;
  void barrier() override;
  void setProgram(const ProgramFingerprint& program) override;
  void abort() override { connections_.abort(); }

 private:
  using Span = SharedMemoryExchange::Span;
  using Exchanges = Wire::Exchanges;

  // At the beginning of a call, on all ranks.
  void connect() {
    if (!connections_.isConnected()) connections_.connect(program(), deadline());
  }
  // The ranks meet where a whole call has no elements, so that a rank whose call has some is found out.
  void moveNothing() {
    if (program().commonNumel == 0) barrier();
  }
  [[nodiscard]] Wire::Deadline deadline() const { return std::chrono::steady_clock::now() + remaining(); }
  [[nodiscard]] SharedMemoryExchange* sharedMemory() { return connections_.sharedMemory(); }
  // Ranks that share memory, as hosts.
  [[nodiscard]] const HostTopology& hosts() const { return connections_.hosts(); }
  [[nodiscard]] PartOwners::LineTo lines();
  // What all other members get to see.
  void countShown(int64_t bytes);
  void exchange(const Exchanges& exchanges, const Pipeline& pipeline = {}, const Exchanges& forwarded = {});
  // One per host, in their order.
  [[nodiscard]] PartOwners among(std::vector<int> owners);

  // As PartOwners::gather() of all ranks, each of which is alone on its host.
  void gatherAmongAll(at::Tensor& bytes);

  // The lanes of this rank, in `flat`, become what its host has of them. Returns how the hosts are to go on.
  ReduceOp reduceToOwnLanes(at::Tensor& flat, const at::Tensor& prepared, const HostLanes& lanes, const ReduceOp& op);
  // Of elements of each member, through shared memory: this rank's become what all members have of them, and what this
  // rank has of its own goes to all members.
  void reduceParts(at::Tensor& flat, const at::Tensor& prepared, const Splits& parts, const ReduceOp& op,
                   int64_t contributors);
  void gatherParts(at::Tensor& flat, const Splits& parts);
  // Whether the ranks of each host do: the same on all ranks, who have to take the same way.
  [[nodiscard]] bool shareMemoryInHosts() const { return hosts().hostCount() == topology().hostCount(); }

  // The parts of an allgather or reduce-scatter that each member deals with between hosts, its own first.
  using PartsOfMembers = std::vector<std::vector<int>>;
  [[nodiscard]] PartsOfMembers partsOfMembers() const;
  // For every n, where the n-th part of each member lies; empty for a member that has fewer.
  static std::vector<std::vector<Span>> spansInTurns(const PartsOfMembers& partsOfMembers, int64_t length);
  // What this host has of each of them that is this rank's.
  std::vector<at::Tensor> reducePartsInHost(const at::Tensor& prepared, int64_t length, const PartsOfMembers& parts,
                                            const ReduceOp& op);
  void reducePartsInMemory(std::vector<at::Tensor>& reduced, const at::Tensor& prepared, const PartsOfMembers& parts,
                           const ReduceOp& op);

  CpuConnections connections_;
  // By the owners of a lane.
  std::map<std::vector<int>, AgreedLine> lines_;
};

}  // namespace bagua
