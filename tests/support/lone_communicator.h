// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>

#include "backend/communicator.h"
#include "backend/cpu/cpu_executor.h"

namespace bagua {

// One rank that has nobody to talk to.
class LoneCommunicator final : public Communicator {
 public:
  LoneCommunicator() : Communicator(0, 1, std::make_shared<const HostTopology>(HostTopology::oneRankPerHost(1))) {}
  void broadcast(at::Tensor&, int) override {}
  void allReduce(at::Tensor&, const ReduceOp&) override {}
  void reduce(at::Tensor&, int, const ReduceOp&) override {}
  void allGather(at::Tensor&, const at::Tensor&) override {}
  void reduceScatter(at::Tensor&, const at::Tensor&, const ReduceOp&) override {}
  void allToAll(at::Tensor&, const at::Tensor&, const Splits&, const Splits&) override {}
  void barrier() override {}
  void abort() override { isAborted = true; }

  std::atomic<bool> isAborted = false;
};

inline CpuExecutor::Communicators loneChannels(int count) {
  CpuExecutor::Communicators made;
  for (int i = 0; i < count; ++i) made.push_back(std::make_unique<LoneCommunicator>());
  return made;
}

}  // namespace bagua
