// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "backend/communicator.h"
#include "backend/host/shared_memory/shared_memory_exchange.h"
#include "backend/host/wire.h"
#include "backend/host_lanes.h"

namespace bagua {

// CPU tensors. Ranks of one host exchange them through shared memory, found at the first call, hosts over a wire that
// only moves bytes. With both, each byte crosses the network once per host: the ranks of a host first reduce among
// themselves, every one a lane (see HostLanes), exchange their lanes with the other hosts, and share the result.
//
// Reductions are done here, in rank order inside a host, then in the order of hosts, with 16-bit floats accumulated in
// 32 bits. The result is the same bits on every rank and every run, for every dtype and operation. Steps and bytes per
// rank between hosts for an allreduce of N bytes: all-to-all of N (h-1)/h with h hosts, reduction of the own part while
// other parts arrive, all-gather of N (h-1)/h.
class HostCommunicator final : public Communicator {
 public:
  explicit HostCommunicator(std::unique_ptr<Wire> wire, std::shared_ptr<const HostTopology> topology);

  void broadcast(at::Tensor& tensor, int root) override;
  void allReduce(at::Tensor& tensor, const ReduceOp& op) override;
  void reduce(at::Tensor& tensor, int root, const ReduceOp& op) override;
  void allGather(at::Tensor& output, const at::Tensor& input) override;
  void reduceScatter(at::Tensor& output, const at::Tensor& input, const ReduceOp& op) override;
  void allToAll(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                const Splits& inputSplits) override;
  void allGatherInPieces(at::Tensor& output, const at::Tensor& input, const Pipeline& pipeline) override;
  void allToAllInPieces(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                        const Splits& inputSplits, const Pipeline& pipeline) override;
  void barrier() override;
  void setProgram(const ProgramFingerprint& program) override;
  void abort() override;

 private:
  using Span = SharedMemoryExchange::Span;
  using Deadline = SharedMemoryExchange::Deadline;
  using Exchanges = std::vector<Wire::Exchange>;
  // The ranks that exchange something between hosts, one per host in their order.
  using Owners = std::vector<int>;

  // At the beginning of a call, on all ranks. Finds out which ranks share memory, at the first call, and whether all
  // have come for the same program, at the first call of each.
  void connect();
  void comparePrograms();
  void shareMemory();
  // What this rank says, of all ranks.
  std::vector<bool> tellAll(bool flag);
  [[nodiscard]] Deadline deadline() const { return std::chrono::steady_clock::now() + remaining(); }

  // Those that share memory with this rank; only itself where there is no shared memory.
  [[nodiscard]] const std::vector<int>& members() const { return hosts_->ranksOf(hosts_->hostOf(rank())); }
  [[nodiscard]] int ownHost() const { return hosts_->hostOf(rank()); }
  [[nodiscard]] bool isOneHost() const { return hosts_->hostCount() == 1; }
  // On `host`, who deals with what is `rank`'s: all its members in turn.
  [[nodiscard]] int deputyOn(int host, int rank) const;

  void swap(const Exchanges& exchanges, const Pipeline& pipeline = {}, const Exchanges& passedOn = {});
  void countShown(int64_t bytes);

  // In place, of what each of `owners` holds. AVG divides by the number of all ranks.
  void allReduceAmong(const Owners& owners, at::Tensor& flat, const ReduceOp& op);
  void allReduceWhole(const Owners& owners, at::Tensor& flat, const ReduceOp& op);
  void allReduceInParts(const Owners& owners, at::Tensor& flat, const ReduceOp& op);
  // In place on the owner that is on `host`.
  void reduceTo(int host, const Owners& owners, at::Tensor& flat, const ReduceOp& op);
  void broadcastAmong(const Owners& owners, int root, at::Tensor& bytes);
  // The lanes of this rank, in `flat`, become what its host has of them. Returns how the hosts are to go on.
  ReduceOp reduceInHost(at::Tensor& flat, const at::Tensor& prepared, const HostLanes& lanes, const ReduceOp& op);
  void gatherInHost(at::Tensor& flat, const HostLanes& lanes);
  [[nodiscard]] std::vector<Span> spansOf(const HostLanes& lanes) const;
  // The parts of an allgather or reduce-scatter that each member deals with between hosts, its own first.
  [[nodiscard]] std::vector<std::vector<int>> partsOfMembers() const;
  // The n-th of them, for every n, becomes what this host has of it, in `reduced` of the member that deals with it.
  void reducePartsInHost(std::vector<at::Tensor>& reduced, const at::Tensor& prepared,
                         const std::vector<std::vector<int>>& parts, const ReduceOp& op);
  void swapInHost(const std::vector<at::Tensor>& received, const std::vector<at::Tensor>& sent);
  // Throws a MismatchError if a rank is to get from this one, or this one from it, another number of bytes than it is
  // sent: the network between hosts would end the process. `item`: bytes per element.
  void checkParts(const std::vector<at::Tensor>& received, const std::vector<at::Tensor>& sent, int64_t item);
  // What the members have for each other, of all ranks' parts.
  void exchangeInHost(const std::vector<at::Tensor>& received, const std::vector<at::Tensor>& sent);

  const std::unique_ptr<Wire> wire_;
  bool isCompared_ = true;
  // Ranks that share memory, as hosts; empty before the first call.
  std::optional<HostTopology> hosts_;
  // Guards the pointer, which abort() follows from another thread.
  std::mutex mutex_;
  std::unique_ptr<SharedMemoryExchange> sharedMemory_;
};

}  // namespace bagua
