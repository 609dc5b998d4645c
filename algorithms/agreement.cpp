// SPDX-License-Identifier: Apache-2.0
#include "algorithms/agreement.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <optional>

namespace bagua {
namespace {

constexpr const char* kCheckAgreement = "bagua:check_agreement";
constexpr int64_t kRefused = 0;

// FNV-1a: the same on every rank, machine and build.
int64_t stableHash(const std::string& text) {
  uint64_t hash = 14695981039346656037ULL;
  for (const unsigned char byte : text) hash = (hash ^ byte) * 1099511628211ULL;
  return static_cast<int64_t>(hash);
}

void check(const at::Tensor& found, const Registration& own, const GroupIdentity& group) {
  for (int rank = 0; rank < group.size; ++rank) {
    TORCH_CHECK_VALUE(found[rank][0].item<int64_t>() != kRefused, "bagua: rank ", rank,
                      " could not register its algorithm (its own error says why); rank ", group.rank, " has ",
                      own.algorithm);
  }
  for (int rank = 0; rank < group.size; ++rank) {
    TORCH_CHECK_VALUE(found[rank][0].item<int64_t>() == found[0][0].item<int64_t>(), "bagua: rank ", rank,
                      " registered another algorithm or other options than rank 0; rank ", group.rank, " has ",
                      own.algorithm);
    TORCH_CHECK_VALUE(found[rank][1].item<int64_t>() == found[0][1].item<int64_t>(), "bagua: rank ", rank,
                      " registered its algorithm on a model of other parameters than rank 0; rank ", group.rank,
                      " has ", own.parameters);
  }
}

}  // namespace

HostTopology agreeOn(const Registration& own, ExecutorProvider& executors, at::Device device) {
  const auto& group = executors.identity();
  const at::Tensor hashes = at::empty({2}, at::kLong);
  hashes[0] = own.algorithm.empty() ? kRefused : stableHash(own.algorithm);
  hashes[1] = stableHash(own.parameters);
  const at::Tensor mine = hashes.to(device);
  at::Tensor all = at::empty({group.size, 2}, mine.options());
  const Operation operation{.type = c10d::OpType::ALLGATHER,
                            .name = kCheckAgreement,
                            .dtype = at::kLong,
                            .numel = 2,
                            .timeout = executors.timeout()};
  std::optional<HostTopology> topology;
  executors.executorFor(device)
      .submit(operation, {all},
              [mine, all, &topology](Communicator& communicator) mutable {
                communicator.allGather(all, mine);
                topology = communicator.topology();
              })
      ->wait(kNoTimeout);
  // A rank that refuses says itself what is wrong.
  if (!own.algorithm.empty()) check(all.cpu(), own, group);
  return *topology;
}

}  // namespace bagua
