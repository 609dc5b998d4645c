// SPDX-License-Identifier: Apache-2.0
#include "algorithms/hook_runner.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>

#include "algorithms/profiler_handover.h"
#include "algorithms/registry.h"
#include "backend/sparse_reduction.h"

namespace bagua {
namespace {

std::unique_ptr<Algorithm> create(const std::string& name, const std::map<std::string, OptionValue>& options) {
  const auto& info = AlgorithmRegistry::find(name);
  return info.create(Options(name, info.options, options));
}

// What DDP waits for where nothing travels.
c10::intrusive_ptr<c10::ivalue::Future> completedFuture(const at::Tensor& value) {
  std::vector<c10::Device> devices;
  if (!value.is_cpu()) devices.push_back(value.device());
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
  future->markCompleted(c10::IValue(std::vector<at::Tensor>{value}));
  return future;
}

int64_t bytesOfAll(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += tensor.is_sparse() ? 0 : static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

}  // namespace

HookRunner::HookRunner(const std::string& algorithm, const std::map<std::string, OptionValue>& options,
                       std::shared_ptr<ExecutorProvider> group, std::vector<at::Tensor> parameters, bool isStaticGraph)
    : name_(algorithm),
      options_(algorithm, AlgorithmRegistry::find(algorithm).options, options),
      group_(std::move(group)),
      parameters_(std::move(parameters)),
      actsOnWeights_(!AlgorithmRegistry::find(algorithm).optimizer.empty()),
      isFirstStatic_(isStaticGraph),
      layouts_(parameters_, isStaticGraph ? 2 : 1),
      algorithm_(create(algorithm, options)),
      configuration_(std::make_shared<const std::string>(name_ + "(" + options_.toString() + ")")) {}

// The first program connects the ranks, for which they wait for each other: here and not in a training step.
void HookRunner::useBackground(std::shared_ptr<ExecutorProvider> group) {
  background_ = std::move(group);
  submitInBackground("bagua:connect", {parameters_.front()}, [](Communicator& communicator, StageSeconds&) {
    communicator.barrier();
  })->wait(kNoTimeout);
}

void HookRunner::useTopology(const HostTopology& topology) {
  spansHosts_ = topology.hostCount() > 1;
  algorithm_->useTopology(topology);
}

c10::intrusive_ptr<c10::ivalue::Future> HookRunner::run(c10d::GradBucket& gradients) {
  TORCH_CHECK(isAnnounced_ || !actsOnWeights_, "bagua: algorithm '", name_, "' has not seen the forward of this ",
              "backward on rank ", rank(),
              ": call the DistributedDataParallel model itself, not its forward(), and in "
              "training mode (to freeze parts of it, put those in evaluation mode)");
  const at::Tensor& buffer = gradients.getBuffer();
  const bool isLast = gradients.isLast() || isFirstStatic_;
  isFirstStatic_ = false;
  if (isLast && actsOnWeights_) queueAfterBackward();
  const auto work = reduceBucket(buffer, layouts_.entriesOf(gradients), gradients.getIndex() == 0, isLast);
  return work ? work->getFuture() : completedFuture(buffer);
}

c10::intrusive_ptr<c10d::Work> HookRunner::reduceBucket(const at::Tensor& flat, const std::vector<BucketEntry>& entries,
                                                        bool isFirst, bool isLast) {
  const auto parts = layouts_.partsOf(entries);
  layouts_.note(parts, isFirst, isLast);
  const bool travels = algorithm_->reducesGradients();
  {
    const std::lock_guard<std::mutex> lock(ledger_->mutex);
    ++ledger_->stats.buckets;
    if (isLast) ++ledger_->stats.steps;
    if (isLast && travels) ++ledger_->stats.rounds;
  }
  if (!travels) return {};
  // The end of backward waits for it.
  const auto wait = algorithm_->bucketsMayOverlap() ? Wait::kNowInAnyOrder : Wait::kNow;
  return submitTo(*group_, "bagua:reduce_bucket", {flat}, wait,
                  [algorithm = algorithm_, gradients = flat, entries, parts](Communicator& communicator,
                                                                             StageSeconds& seconds) mutable {
                    reduce(*algorithm, gradients, entries, parts, communicator, seconds);
                  });
}

void HookRunner::reduce(Algorithm& algorithm, at::Tensor& gradients, const std::vector<BucketEntry>& whole,
                        const std::vector<std::vector<BucketEntry>>& parts, Communicator& communicator,
                        StageSeconds& seconds) {
  if (gradients.is_sparse()) {
    const Stage stage(seconds, "sparse_allreduce");
    return allReduceSparse(communicator, gradients, algorithm.averages());
  }
  if (parts.size() == 1 && isSameOrder(parts[0], whole)) {
    Bucket bucket{.flat = gradients, .entries = whole};
    algorithm.reduce(bucket, communicator);
    return addTo(seconds, bucket.seconds);
  }
  for (const auto& part : parts) {
    Bucket bucket = gatherPart(part);
    algorithm.reduce(bucket, communicator);
    scatterPart(bucket, part);
    addTo(seconds, bucket.seconds);
  }
}

// Before DDP's own end of backward, which is queued after the last bucket; after it in the first step of a static
// graph.
void HookRunner::queueAfterBackward() {
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] { self->afterBackward(); });
}

void HookRunner::afterBackward() {
  const at::NoGradGuard noGrad;
  isAnnounced_ = false;
  algorithm_->afterBackward(*this);
}

c10::intrusive_ptr<c10d::Work> HookRunner::submit(const char* name, const std::vector<at::Tensor>& tensors, Wait wait,
                                                  Task task) {
  return submitTo(*group_, name, tensors, wait, std::move(task));
}

c10::intrusive_ptr<c10d::Work> HookRunner::submitInBackground(const char* name, const std::vector<at::Tensor>& tensors,
                                                              Task task) {
  TORCH_INTERNAL_ASSERT(background_ != nullptr);
  return submitTo(*background_, name, tensors, Wait::kLater, std::move(task));
}

c10::intrusive_ptr<c10d::Work> HookRunner::submitTo(ExecutorProvider& group, const char* name,
                                                    const std::vector<at::Tensor>& tensors, Wait wait, Task task) {
  const at::Tensor& first = tensors.front();
  int64_t numel = 0;
  for (const auto& tensor : tensors) numel += tensor.numel();
  {
    const std::lock_guard<std::mutex> lock(ledger_->mutex);
    ledger_->stats.logicalBytes += bytesOfAll(tensors);
  }
  const Operation operation{.type = c10d::OpType::ALLREDUCE,
                            .name = name,
                            .dtype = first.scalar_type(),
                            .numel = numel,
                            .timeout = group.timeout(),
                            .mayOverlap = wait == Wait::kNowInAnyOrder,
                            .isProfiled = wait != Wait::kLater,
                            .configuration = configuration_};
  const auto handover = wait != Wait::kLater ? ProfilerHandover::ofThisThread() : ProfilerHandover();
  auto program = [ledger = ledger_, handover, task = std::move(task)](Communicator& communicator) {
    const ProfilerHandover::Scope profiled(handover);
    const Traffic before = communicator.traffic();
    StageSeconds seconds;
    task(communicator, seconds);
    const std::lock_guard<std::mutex> lock(ledger->mutex);
    ledger->stats.traffic += communicator.traffic().since(before);
    addTo(ledger->stats.seconds, seconds);
  };
  return group.executorFor(first.device()).submit(operation, tensors, std::move(program));
}

void HookRunner::countRound() {
  const std::lock_guard<std::mutex> lock(ledger_->mutex);
  ++ledger_->stats.rounds;
}

void HookRunner::beforeForward(std::vector<Momentum> momenta) {
  const at::NoGradGuard noGrad;
  algorithm_->useMomenta(std::move(momenta));
  algorithm_->beforeForward(*this);
  isAnnounced_ = true;
}

void HookRunner::afterStep() {
  const at::NoGradGuard noGrad;
  algorithm_->afterStep(*this);
}

bool HookRunner::abort() {
  const at::NoGradGuard noGrad;
  return algorithm_->abort(*this);
}

bool HookRunner::resume() { return algorithm_->resume(*this); }

void HookRunner::leave() {
  const at::NoGradGuard noGrad;
  algorithm_->leave(*this);
  algorithm_ = create("gradient_allreduce", {});
}

void HookRunner::load(const AlgorithmState& state, BucketLayout layout) {
  layouts_.check(layout);
  algorithm_->load(state, *this);
  layouts_.want(std::move(layout));
}

HookStats HookRunner::stats() const {
  const std::lock_guard<std::mutex> lock(ledger_->mutex);
  return ledger_->stats;
}

}  // namespace bagua
