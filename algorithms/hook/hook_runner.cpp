// SPDX-License-Identifier: Apache-2.0
#include "algorithms/hook/hook_runner.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>

#include <utility>

#include "algorithms/capture.h"
#include "algorithms/hook/codec_check.h"
#include "algorithms/hook/profiler_handover.h"
#include "algorithms/registry.h"

namespace bagua {
namespace {

// What DDP waits for where nothing travels.
c10::intrusive_ptr<c10::ivalue::Future> completedFuture(const at::Tensor& value) {
  std::vector<c10::Device> devices;
  if (!value.is_cpu()) devices.push_back(value.device());
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
  future->markCompleted(c10::IValue(std::vector<at::Tensor>{value}));
  return future;
}

Slots slotsOf(const std::vector<BucketEntry>& entries) {
  Slots slots;
  slots.reserve(entries.size());
  for (const auto& entry : entries) slots.push_back({.parameter = entry.parameter, .gradient = entry.gradient});
  return slots;
}

}  // namespace

HookRunner::HookRunner(const std::string& algorithm, const std::map<std::string, OptionValue>& options,
                       std::shared_ptr<ExecutorProvider> group, std::vector<at::Tensor> parameters, bool isStaticGraph)
    : name_(algorithm),
      options_(algorithm, AlgorithmRegistry::find(algorithm).options, options),
      members_(std::move(group)),
      parameters_(std::move(parameters)),
      actsOnWeights_(!AlgorithmRegistry::find(algorithm).optimizer.empty()),
      staticLeft_(isStaticGraph ? parameters_.size() : 0),
      gradients_(parameters_),
      layouts_(parameters_, isStaticGraph ? 2 : 1) {
  if (!parameters_.empty()) checkCodecs(name_, options_, parameters_.front().device());
  take(algorithm, options);
}

void HookRunner::take(const std::string& name, const std::map<std::string, OptionValue>& values) {
  const auto& info = AlgorithmRegistry::find(name);
  const Options options(name, info.options, values);
  std::shared_ptr<Algorithm> algorithm = info.create(options);
  traits_ = algorithm->traits();
  loadedGuardHash_ = 0;
  configuration_ = std::make_shared<const std::string>(name + "(" + options.toString() + ")");
  const std::lock_guard<std::mutex> lock(mutex_);
  // What is replaced ends when nobody looks at it any more.
  algorithm_.swap(algorithm);
}

GradientScope HookRunner::scope() const {
  const auto* const onWeights = algorithm_->as<ActsOnWeights>();
  return onWeights != nullptr ? onWeights->gradientScope() : GradientScope::kAllRanks;
}

void HookRunner::useModel(std::vector<int64_t> layers, std::vector<at::Tensor> buffers) {
  layers_ = std::move(layers);
  buffers_ = std::move(buffers);
}

void HookRunner::useParameters(const std::vector<ParameterFacts>& facts) {
  facts_ = facts;
  if (auto* const reads = algorithm_->as<ReadsNames>()) reads->useParameters(facts);
  auto* const isGuarded = algorithm_->as<IsGuarded>();
  if (isGuarded == nullptr) return;
  std::vector<std::string> names;
  for (const auto& one : facts) names.push_back(one.name);
  isGuarded->guard().useNames(std::move(names));
}

void HookRunner::useOptimizer(bool isLinear) {
  isOptimizerLinear_ = isLinear;
  auto* const reads = algorithm_->as<ReadsOptimizer>();
  if (reads == nullptr) return;
  reads->useOptimizer(isLinear);
  traits_ = algorithm_->traits();
}

// The first program connects the ranks, for which they wait for each other: here and not in a training step.
void HookRunner::useBackground(std::shared_ptr<ExecutorProvider> group) {
  background_ = std::move(group);
  backgroundExecutor_ = background_->executorFor(parameters_.front().device());
  submitInBackground("bagua:connect", {parameters_.front()}, [](Communicator& communicator, StageSeconds&) {
    communicator.barrier();
  })->wait(kNoTimeout);
}

void HookRunner::begin() {
  if (std::exchange(hasBegun_, true)) return;
  if (auto* const onWeights = algorithm_->as<ActsOnWeights>()) onWeights->useModel(*this);
}

std::vector<int> HookRunner::hostRanks() const {
  if (scope() != GradientScope::kHost) return {};
  return topology().ranksOf(topology().hostOf(rank()));
}

c10::intrusive_ptr<c10::ivalue::Future> HookRunner::run(c10d::GradBucket& gradients) {
  try {
    return runBucket(gradients);
  } catch (const c10::DistError&) {
    return failBackward(std::current_exception());
  } catch (...) {
    if (!refusal_) throw;
    return failBackward(std::current_exception());
  }
}

c10::intrusive_ptr<c10::ivalue::Future> HookRunner::failBackward(std::exception_ptr error) {
  hasBackwardFailed_ = true;
  auto failed = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  failed->setError(std::move(error));
  return failed;
}

c10::intrusive_ptr<c10::ivalue::Future> HookRunner::runBucket(c10d::GradBucket& gradients) {
  TORCH_CHECK(
      tracker_.isAnnounced() || !actsOnWeights_, "bagua: algorithm '", name_,
      "' has not seen the forward of this backward on rank ", rank(),
      ": call the DistributedDataParallel model itself, not its forward(), and in training mode (to freeze parts "
      "of it, put those in evaluation mode)");
  const at::Tensor& buffer = gradients.getBuffer();
  if (parameters_.empty()) checkCodecs(name_, options_, buffer.device());
  const auto [isFirst, isLast] = placeInStep(gradients);
  if (isLast && actsOnWeights_) queueAfterBackward();
  Slots slots = layouts_.slotsOf(gradients);
  const bool tellsUse = findUse(gradients, slots);
  const auto work = reduceSlots(buffer, std::move(slots), isFirst, isLast, tellsUse);
  return work ? work->getFuture() : completedFuture(buffer);
}

// Where the model is not known, nor what it told DDP, an unused parameter is one without .grad.
bool HookRunner::findUse(const c10d::GradBucket& gradients, Slots& slots) {
  if (use_) {
    for (auto& slot : slots) slot.isUsed = use_->take(slot.parameter);
    return true;
  }
  if (!parameters_.empty() || slots.empty()) return false;
  const auto parameters = gradients.getParameters();
  for (size_t i = 0; i < slots.size(); ++i) slots[i].isUsed = parameters[i].grad().defined();
  return true;
}

c10::intrusive_ptr<c10d::Work> HookRunner::reduceBucket(const at::Tensor& flat, const std::vector<BucketEntry>& entries,
                                                        bool isFirst, bool isLast) {
  TORCH_CHECK_VALUE(flat.is_sparse() || !entries.empty(), "bagua: a bucket of dense gradients must have entries, got ",
                    "none for ", flat.numel(), " elements on rank ", rank());
  return reduceSlots(flat, slotsOf(entries), isFirst, isLast, /*tellsUse=*/false);
}

c10::intrusive_ptr<c10d::Work> HookRunner::reduceToParts(const at::Tensor& flat, const at::Tensor& own,
                                                         const std::vector<BucketEntry>& entries, bool isFirst) {
  TORCH_CHECK_VALUE(
      algorithm_->as<ReducesToParts>() != nullptr, "bagua: algorithm '", name_,
      "' cannot give each rank a part of the mean: 'quantized_allreduce', 'bytegrad' and 'gradient_allreduce' can");
  Slots slots = slotsOf(entries);
  auto parts = beginBucket(flat, slots, isFirst);
  hasParts_ = true;
  ledger_->countLogicalBytes({flat});
  return submitBucket("bagua:reduce_to_parts", {flat, own},
                      {.gradients = flat,
                       .whole = std::move(slots),
                       .parts = std::move(parts),
                       .step = step_ - 1,
                       .way = BucketProgram::Way::kReduceToParts,
                       .isInParts = true,
                       .own = own});
}

c10::intrusive_ptr<c10d::Work> HookRunner::passOver(const at::Tensor& flat, const std::vector<BucketEntry>& entries,
                                                    bool isInParts) {
  TORCH_INTERNAL_ASSERT(keepsResiduals());
  Slots slots = slotsOf(entries);
  std::vector<Slots> parts = {slots};
  return submitBucket("bagua:pass_over", {flat},
                      {.gradients = flat,
                       .whole = std::move(slots),
                       .parts = std::move(parts),
                       .step = step_ - 1,
                       .way = BucketProgram::Way::kPassOver,
                       .isInParts = isInParts});
}

std::vector<Slots> HookRunner::beginBucket(const at::Tensor& flat, const Slots& slots, bool isFirst) {
  checkCapture({flat});
  if (isFirst) {
    awaitAgreement();
    refusal_ = nullptr;
    try {
      followMembers(flat.device());
    } catch (...) {
      refusal_ = std::current_exception();
    }
  }
  if (refusal_) std::rethrow_exception(refusal_);
  auto parts = layouts_.partsOf(slots);
  layouts_.note(slots, parts, isFirst);
  if (isFirst) ++step_;
  ledger_->countBucket();
  return parts;
}

c10::intrusive_ptr<c10d::Work> HookRunner::submitBucket(const char* name, const std::vector<at::Tensor>& tensors,
                                                        BucketProgram program) {
  // The end of backward waits for it.
  const auto wait = traits_.bucketsMayOverlap ? Wait::kNowInAnyOrder : Wait::kNow;
  program.isOfFirstShards = isOfFirstShards();
  program.isCaptured = members_.group().isCapturing(program.gradients.device());
  auto gradients = layouts_.gradientsOf(program.parts);
  // Guards at different levels would code the same gradients in different ways.
  if (loadedGuardHash_ != 0 && program.step == loadedStep_ && gradients) {
    gradients = std::make_shared<const GradientList>(
        GradientList{.text = "guard's levels " + gradients->text, .hash = gradients->hash ^ loadedGuardHash_});
  }
  return submitTo(
      host_ ? *host_ : members_.group(), name, tensors, wait,
      [algorithm = algorithm_, program = std::move(program)](Communicator& communicator,
                                                             StageSeconds& seconds) mutable {
        program.run(*algorithm, communicator, seconds);
      },
      std::move(gradients));
}

c10::intrusive_ptr<c10d::Work> HookRunner::reduceSlots(const at::Tensor& flat, Slots slots, bool isFirst, bool isLast,
                                                       bool tellsUse) {
  auto parts = beginBucket(flat, slots, isFirst);
  if (isLast) endStep();
  if (!reducesGradients()) return {};
  ledger_->countLogicalBytes({flat});
  return submitBucket("bagua:reduce_bucket", {flat},
                      {.gradients = flat,
                       .whole = std::move(slots),
                       .parts = std::move(parts),
                       .step = step_ - 1,
                       .tellsUse = tellsUse});
}

void HookRunner::endStep() {
  layouts_.noteEnd();
  ledger_->countStep();
  if (reducesGradients()) ledger_->countRound();
  if ((!std::exchange(hasParts_, false) && !shards_) || !keepsResiduals()) return;
  // Nobody waits for it but what comes next of the algorithm.
  const at::Device device = parameters_.front().device();
  agreement_ = submitTo(shards_ ? *shards_ : members_.group(), "bagua:agree_on_step", {at::empty({0}, device)},
                        Wait::kLater, [algorithm = algorithm_, device](Communicator& communicator, StageSeconds&) {
                          algorithm->as<KeepsResiduals>()->agreeOnStep(device, communicator);
                        });
}

void HookRunner::awaitAgreement() {
  if (const auto work = std::exchange(agreement_, nullptr)) work->wait(kNoTimeout);
}

// Before DDP's own end of backward, which is queued after the last bucket; after it in the first step of a static
// graph.
void HookRunner::queueAfterBackward() {
  auto& engine = torch::autograd::Engine::get_default_engine();
  engine.queue_callback([&engine, self = shared_from_this()] {
    try {
      self->afterBackward();
    } catch (...) {
      // DDP can be used again only when it has ended this backward, too.
      engine.queue_callback([error = std::current_exception()] { std::rethrow_exception(error); });
    }
  });
}

void HookRunner::atBackward(bool isBypassed) {
  // Also of a backward under no_sync(), after which the gradients are no longer gone.
  lookForSkippedStep();
  happen(StepEvent::kBackwardBegins);
  // That of a forward under no_sync() is else none of ours.
  if (!tracker_.isAnnounced() || !isBypassed) return;
  ++step_;
  ledger_->countStep();
  queueAfterBackward();
}

void HookRunner::lookForSkippedStep() {
  if (countsSteps() && tracker_.isPending() && gradients_.haveGone()) happen(StepEvent::kFoundSkipped);
}

void HookRunner::lookForSkippedStepAtEnd() {
  if (!countsSteps() || !tracker_.isPending() || forwards_.any()) return;
  if (!gradients_.areFinite() || gradients_.haveGone()) happen(StepEvent::kFoundSkipped);
}

void HookRunner::happen(StepEvent event) {
  const at::NoGradGuard noGrad;
  const StepDuties duties = tracker_.on(event);
  auto* const counts = algorithm_->as<CountsSkippedSteps>();
  if (duties.beginSkipped && counts != nullptr) counts->beginSkippedStep(*this);
  if (duties.skipped && counts != nullptr) counts->afterSkippedStep(*this);
  auto* const onWeights = algorithm_->as<ActsOnWeights>();
  if (duties.step && onWeights != nullptr) onWeights->afterStep(*this);
}

void HookRunner::countSkippedStep() {
  lookForSkippedStepAtEnd();
  happen(StepEvent::kEnd);
}

// Also where nothing travels: a graph that was captured in such a step would leave out what others send.
void HookRunner::checkCapture(const std::vector<at::Tensor>& tensors) const {
  if (tensors.empty() || !members_.group().isCapturing(tensors.front().device()) || traits_.isReplayable) return;
  refuseCapture(members_.group(), tensors.front().device(), "algorithm ", *configuration_);
}

void HookRunner::afterBackward() {
  checkCapture(parameters_);
  const at::NoGradGuard noGrad;
  // DDP, whose own end comes next, raises the error of the bucket.
  if (std::exchange(hasBackwardFailed_, false)) return forwards_.clear();
  happen(StepEvent::kBackwardEnds);
  if (countsSteps()) gradients_.note();
  forwards_.clear();
  if (auto* const onWeights = algorithm_->as<ActsOnWeights>()) onWeights->afterBackward(*this);
}

c10::intrusive_ptr<c10d::Work> HookRunner::submit(const char* name, const std::vector<at::Tensor>& tensors, Wait wait,
                                                  Task task) {
  ledger_->countLogicalBytes(tensors);
  return submitTo(members_.group(), name, tensors, wait, std::move(task));
}

c10::intrusive_ptr<c10d::Work> HookRunner::submitInBackground(const char* name, const std::vector<at::Tensor>& tensors,
                                                              Task task) {
  TORCH_INTERNAL_ASSERT(background_ != nullptr);
  ledger_->countLogicalBytes(tensors);
  return submitTo(*background_, name, tensors, Wait::kLater, std::move(task));
}

c10::intrusive_ptr<c10d::Work> HookRunner::submitAmongShards(const char* name, const std::vector<at::Tensor>& tensors,
                                                             Task task) {
  if (!shards_) return {};
  ledger_->countLogicalBytes(tensors);
  return submitTo(*shards_, name, tensors, Wait::kLater, std::move(task));
}

c10::intrusive_ptr<c10d::Work> HookRunner::submitTo(ExecutorProvider& group, const char* name,
                                                    const std::vector<at::Tensor>& tensors, Wait wait, Task task,
                                                    std::shared_ptr<const GradientList> gradients) {
  const at::Tensor& first = tensors.front();
  int64_t numel = 0;
  for (const auto& tensor : tensors) numel += tensor.numel();
  const auto* const onWeights = algorithm_->as<ActsOnWeights>();
  const int64_t commonStep = onWeights != nullptr ? onWeights->commonStep() : 0;
  const Operation operation{.type = c10d::OpType::ALLREDUCE,
                            .name = name,
                            .dtype = first.scalar_type(),
                            .numel = numel,
                            .timeout = group.timeout(),
                            .mayOverlap = wait == Wait::kNowInAnyOrder && (first.is_cpu() || traits_.isStateless),
                            .isProfiled = wait != Wait::kLater,
                            .configuration = configuration_,
                            .gradients = std::move(gradients),
                            .step = static_cast<uint32_t>(traits_.sendsByStep ? step_ : commonStep)};
  const auto handover = wait != Wait::kLater ? ProfilerHandover::ofThisThread() : ProfilerHandover();
  auto program = [ledger = ledger_->lend(), handover, task = std::move(task)](Communicator& communicator) {
    const ProfilerHandover::Scope profiled(handover);
    const Traffic before = communicator.traffic();
    StageSeconds seconds;
    task(communicator, seconds);
    ledger->add(communicator.traffic().since(before), seconds);
  };
  return group.executorFor(first.device())->submit(operation, tensors, std::move(program));
}

void HookRunner::beforeForward(std::vector<Momentum> momenta) {
  checkCapture(parameters_);
  const at::NoGradGuard noGrad;
  // An error of another kind may have ended that backward before its end.
  hasBackwardFailed_ = false;
  if (!parameters_.empty()) followMembers(parameters_.front().device());
  lookForSkippedStep();
  happen(StepEvent::kForward);
  if (auto* const uses = algorithm_->as<UsesMomenta>()) uses->useMomenta(std::move(momenta));
  if (auto* const onWeights = algorithm_->as<ActsOnWeights>()) onWeights->beforeForward(*this);
}

void HookRunner::afterStep() {
  checkCapture(parameters_);
  happen(StepEvent::kOptimizerStep);
}

}  // namespace bagua
