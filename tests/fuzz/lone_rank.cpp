// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/lone_rank.h"

#include <c10/util/Exception.h>

#include <numeric>

#include "backend/process_group/work_bagua.h"

namespace bagua::fuzz {
namespace {

std::shared_ptr<const HostTopology> topologyOf(int size, const std::vector<std::string>& hosts) {
  return std::make_shared<const HostTopology>(hosts.empty() ? HostTopology::oneRankPerHost(size) : HostTopology(hosts));
}

// Checks what the caller promises, and receives what the fuzzer makes up.
class MadeUpPeers final : public Communicator {
 public:
  MadeUpPeers(int size, const std::vector<std::string>& hosts, LoneRank::Peers peers)
      : Communicator(0, size, topologyOf(size, hosts)), peers_(std::move(peers)) {}

  void broadcast(at::Tensor& tensor, int root) override {
    checkRank(root);
    if (root != rank()) receive(tensor);
  }
  void allReduce(at::Tensor& tensor, const ReduceOp& /*op*/) override { receive(tensor); }
  void reduce(at::Tensor& tensor, int root, const ReduceOp& /*op*/) override {
    checkRank(root);
    if (root == rank()) receive(tensor);
  }
  void allGather(at::Tensor& output, const at::Tensor& input) override {
    TORCH_INTERNAL_ASSERT(output.numel() == size() * input.numel());
    // As if all said the same, until the peers make up something else.
    for (int rank = 0; rank < size(); ++rank) {
      output.view({size(), input.numel()})[rank].copy_(input.reshape({input.numel()}));
    }
    receive(output);
  }
  void reduceScatter(at::Tensor& output, const at::Tensor& input, const ReduceOp& /*op*/) override {
    TORCH_INTERNAL_ASSERT(input.numel() == size() * output.numel());
    receive(output);
  }
  void allToAll(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                const Splits& inputSplits) override {
    checkSplits(output, outputSplits);
    checkSplits(input, inputSplits);
    receive(output);
  }
  void barrier() override {}

 private:
  void checkRank(int root) const { TORCH_INTERNAL_ASSERT(0 <= root && root < size(), "no rank ", root); }
  void checkSplits(const at::Tensor& tensor, const Splits& splits) const {
    if (splits.empty()) {
      TORCH_INTERNAL_ASSERT(tensor.numel() % size() == 0);
      return;
    }
    TORCH_INTERNAL_ASSERT(static_cast<int>(splits.size()) == size());
    for (const int64_t part : splits) TORCH_INTERNAL_ASSERT(part >= 0);
    TORCH_INTERNAL_ASSERT(std::accumulate(splits.begin(), splits.end(), int64_t{0}) == tensor.numel());
  }
  void receive(const at::Tensor& tensor) {
    if (tensor.numel() > 0) peers_(tensor.mutable_data_ptr(), tensor.nbytes());
  }

  const LoneRank::Peers peers_;
};

}  // namespace

LoneRank::LoneRank(int size, const std::vector<std::string>& hosts, Peers peers)
    : identity_{"fuzzed", 0, size}, communicator_(std::make_unique<MadeUpPeers>(size, hosts, std::move(peers))) {}

c10::intrusive_ptr<c10d::Work> LoneRank::submit(Operation operation, std::vector<at::Tensor> results, Program program) {
  program(*communicator_);
  auto work = c10::make_intrusive<WorkBagua>(identity_.rank, operation, std::move(results));
  static_cast<void>(work->complete());
  return work;
}

}  // namespace bagua::fuzz
