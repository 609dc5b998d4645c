// SPDX-License-Identifier: Apache-2.0
#include "algorithms/comm_hook.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstring>

#include "algorithms/registry.h"
#include "backend/sparse_reduction.h"

namespace bagua {
namespace {

constexpr const char* kReduceBucket = "bagua:reduce_bucket";
constexpr const char* kCheckAgreement = "bagua:check_agreement";

std::unique_ptr<Algorithm> create(const std::string& name, const std::map<std::string, OptionValue>& options) {
  const auto& info = AlgorithmRegistry::find(name);
  return info.create(Options(name, info.options, options));
}

// FNV-1a: the same on every rank, machine and build.
int64_t stableHash(const std::string& text) {
  uint64_t hash = 14695981039346656037ULL;
  for (const unsigned char byte : text) hash = (hash ^ byte) * 1099511628211ULL;
  return static_cast<int64_t>(hash);
}

}  // namespace

HookRunner::HookRunner(const std::string& algorithm, const std::map<std::string, OptionValue>& options,
                       std::shared_ptr<ExecutorProvider> executors)
    : name_(algorithm),
      options_(algorithm, AlgorithmRegistry::find(algorithm).options, options),
      executors_(std::move(executors)),
      algorithm_(create(algorithm, options)) {}

c10::intrusive_ptr<c10::ivalue::Future> HookRunner::run(c10d::GradBucket& gradients) {
  at::Tensor buffer = gradients.getBufferRef();
  std::shared_ptr<Algorithm> algorithm;
  {
    const std::lock_guard<std::mutex> lock(ledger_->mutex);
    algorithm = algorithm_;
    HookStats& stats = ledger_->stats;
    ++stats.buckets;
    if (gradients.isLast()) ++stats.steps;
    stats.logicalBytes += buffer.is_sparse() ? 0 : static_cast<int64_t>(buffer.nbytes());
  }
  const Operation operation{.type = c10d::OpType::ALLREDUCE,
                            .name = kReduceBucket,
                            .dtype = buffer.scalar_type(),
                            .numel = buffer.numel(),
                            .timeout = executors_->timeout()};
  return executors_->executorFor(buffer.device())
      .submit(operation, {buffer},
              [ledger = ledger_, algorithm, buffer](Communicator& communicator) mutable {
                reduce(*algorithm, *ledger, buffer, communicator);
              })
      ->getFuture();
}

void HookRunner::reduce(Algorithm& algorithm, Ledger& ledger, at::Tensor& gradients, Communicator& communicator) {
  const int64_t sentBefore = communicator.traffic().sentBytes;
  Bucket bucket{gradients};
  if (gradients.is_sparse()) {
    const Stage stage(bucket, "sparse_allreduce");
    allReduceSparse(communicator, gradients, algorithm.averages());
  } else {
    algorithm.reduce(bucket, communicator);
  }
  const std::lock_guard<std::mutex> lock(ledger.mutex);
  ledger.stats.wireBytes += communicator.traffic().sentBytes - sentBefore;
  for (const auto& [stage, seconds] : bucket.seconds) ledger.stats.seconds[stage] += seconds;
}

void HookRunner::checkAgreement(const std::string& parameters, at::Device device) {
  const auto& group = executors_->identity();
  const std::string own = name_ + "(" + options_.toString() + ")";
  const at::Tensor hashes = at::empty({2}, at::kLong);
  hashes[0] = stableHash(own);
  hashes[1] = stableHash(parameters);
  const at::Tensor mine = hashes.to(device);
  at::Tensor all = at::empty({group.size, 2}, mine.options());
  const Operation operation{.type = c10d::OpType::ALLGATHER,
                            .name = kCheckAgreement,
                            .dtype = at::kLong,
                            .numel = 2,
                            .timeout = executors_->timeout()};
  executors_->executorFor(device)
      .submit(operation, {all}, [mine, all](Communicator& communicator) mutable { communicator.allGather(all, mine); })
      ->wait(kNoTimeout);
  const at::Tensor found = all.cpu();
  for (int rank = 0; rank < group.size; ++rank) {
    TORCH_CHECK_VALUE(found[rank][0].item<int64_t>() == found[0][0].item<int64_t>(), "bagua: rank ", rank,
                      " registered another algorithm or other options than rank 0; rank ", group.rank, " has ", own);
    TORCH_CHECK_VALUE(found[rank][1].item<int64_t>() == found[0][1].item<int64_t>(), "bagua: rank ", rank,
                      " registered '", name_, "' on a model of other parameters than rank 0; rank ", group.rank,
                      " has ", parameters);
  }
}

void HookRunner::detach() {
  const std::lock_guard<std::mutex> lock(ledger_->mutex);
  algorithm_ = create("gradient_allreduce", {});
}

HookStats HookRunner::stats() const {
  const std::lock_guard<std::mutex> lock(ledger_->mutex);
  return ledger_->stats;
}

}  // namespace bagua
