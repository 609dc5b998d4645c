// SPDX-License-Identifier: Apache-2.0
#include "algorithms/hook/hook_runner.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>

#include <cmath>
#include <utility>

#include "algorithms/capture.h"
#include "algorithms/hook/bucket_program.h"
#include "algorithms/hook/codec_check.h"
#include "algorithms/hook/profiler_handover.h"
#include "algorithms/registry.h"
#include "algorithms/shared/weights.h"

namespace bagua {
namespace {

std::unique_ptr<Algorithm> create(const std::string& name, const std::map<std::string, OptionValue>& options) {
  const auto& info = AlgorithmRegistry::find(name);
  return info.create(Options(name, info.options, options));
}

constexpr const char* kSuccessor = "gradient_allreduce";

constexpr AgreementWords kOfLeaving{"could not remove its algorithm",
                                    "removes its algorithm at another moment than rank 0",
                                    "removes its algorithm with an optimizer of another state than rank 0"};

constexpr AgreementWords kOfSynchronizing{"could not synchronise its weights",
                                          "synchronises its weights at another moment than rank 0",
                                          "synchronises its weights at another moment than rank 0"};

constexpr AgreementWords kOfAborting{"could not stop its algorithm",
                                     "stops its algorithm at another moment than rank 0",
                                     "stops its algorithm at another moment than rank 0"};

// In a state, beside what is the algorithm's.
constexpr const char* kStepSkipped = "is_step_skipped";

std::shared_ptr<const std::string> configurationOf(const std::string& name, const Options& options) {
  return std::make_shared<const std::string>(name + "(" + options.toString() + ")");
}

// What DDP waits for where nothing travels.
c10::intrusive_ptr<c10::ivalue::Future> completedFuture(const at::Tensor& value) {
  std::vector<c10::Device> devices;
  if (!value.is_cpu()) devices.push_back(value.device());
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
  future->markCompleted(c10::IValue(std::vector<at::Tensor>{value}));
  return future;
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
      gradients_(parameters_),
      layouts_(parameters_, isStaticGraph ? 2 : 1) {
  if (!parameters_.empty()) checkCodecs(name_, options_, parameters_.front().device());
  take(create(algorithm, options), configurationOf(name_, options_));
}

void HookRunner::take(std::shared_ptr<Algorithm> algorithm, std::shared_ptr<const std::string> configuration) {
  traits_ = algorithm->traits();
  configuration_ = std::move(configuration);
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
  if (auto* const reads = algorithm_->as<ReadsNames>()) reads->useParameters(facts);
}

// The first program connects the ranks, for which they wait for each other: here and not in a training step.
void HookRunner::useBackground(std::shared_ptr<ExecutorProvider> group) {
  background_ = std::move(group);
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
  TORCH_CHECK(tracker_.isAnnounced() || !actsOnWeights_, "bagua: algorithm '", name_,
              "' has not seen the forward of this ", "backward on rank ", rank(),
              ": call the DistributedDataParallel model itself, not its forward(), and in "
              "training mode (to freeze parts of it, put those in evaluation mode)");
  const at::Tensor& buffer = gradients.getBuffer();
  if (parameters_.empty()) checkCodecs(name_, options_, buffer.device());
  const bool isLast = gradients.isLast() || isFirstStatic_;
  isFirstStatic_ = false;
  if (isLast && actsOnWeights_) queueAfterBackward();
  Slots slots = layouts_.slotsOf(gradients);
  const bool tellsUse = findUse(gradients, slots);
  const auto work = reduceSlots(buffer, std::move(slots), gradients.getIndex() == 0, isLast, tellsUse);
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
  Slots slots;
  slots.reserve(entries.size());
  for (const auto& entry : entries) slots.push_back({.parameter = entry.parameter, .gradient = entry.gradient});
  return reduceSlots(flat, std::move(slots), isFirst, isLast, /*tellsUse=*/false);
}

c10::intrusive_ptr<c10d::Work> HookRunner::reduceSlots(const at::Tensor& flat, Slots slots, bool isFirst, bool isLast,
                                                       bool tellsUse) {
  checkCapture({flat});
  auto parts = layouts_.partsOf(slots);
  layouts_.note(slots, parts, isFirst, isLast);
  if (isFirst) ++step_;
  const bool travels = reducesGradients();
  ledger_->countBucket();
  if (isLast) ledger_->countStep();
  if (isLast && travels) ledger_->countRound();
  if (!travels) return {};
  // The end of backward waits for it.
  const auto wait = traits_.bucketsMayOverlap ? Wait::kNowInAnyOrder : Wait::kNow;
  auto gradients = layouts_.gradientsOf(parts);
  return submitTo(
      host_ ? *host_ : *group_, "bagua:reduce_bucket", {flat}, wait,
      [algorithm = algorithm_, program = BucketProgram{flat, std::move(slots), std::move(parts), step_ - 1, tellsUse}](
          Communicator& communicator, StageSeconds& seconds) mutable {
        program.run(*algorithm, communicator, seconds);
      },
      std::move(gradients));
}

// Before DDP's own end of backward, which is queued after the last bucket; after it in the first step of a static
// graph.
void HookRunner::queueAfterBackward() {
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] { self->afterBackward(); });
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
  if (tensors.empty() || !group_->isCapturing(tensors.front().device()) || traits_.isReplayable) return;
  refuseCapture(*group_, tensors.front().device(), "algorithm ", *configuration_);
}

void HookRunner::afterBackward() {
  checkCapture(parameters_);
  const at::NoGradGuard noGrad;
  happen(StepEvent::kBackwardEnds);
  if (countsSteps()) gradients_.note();
  forwards_.clear();
  if (auto* const onWeights = algorithm_->as<ActsOnWeights>()) onWeights->afterBackward(*this);
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
                                                    const std::vector<at::Tensor>& tensors, Wait wait, Task task,
                                                    std::shared_ptr<const GradientList> gradients) {
  const at::Tensor& first = tensors.front();
  int64_t numel = 0;
  for (const auto& tensor : tensors) numel += tensor.numel();
  ledger_->countLogicalBytes(tensors);
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
  auto program = [ledger = ledger_, handover, task = std::move(task)](Communicator& communicator) {
    const ProfilerHandover::Scope profiled(handover);
    const Traffic before = communicator.traffic();
    StageSeconds seconds;
    task(communicator, seconds);
    ledger->add(communicator.traffic().since(before), seconds);
  };
  return group.executorFor(first.device()).submit(operation, tensors, std::move(program));
}

void HookRunner::beforeForward(std::vector<Momentum> momenta) {
  checkCapture(parameters_);
  const at::NoGradGuard noGrad;
  lookForSkippedStep();
  happen(StepEvent::kForward);
  if (auto* const uses = algorithm_->as<UsesMomenta>()) uses->useMomenta(std::move(momenta));
  if (auto* const onWeights = algorithm_->as<ActsOnWeights>()) onWeights->beforeForward(*this);
}

void HookRunner::checkWeightsAreFree(const char* call) const {
  TORCH_CHECK(!forwards_.any(), "bagua: ", call, " of algorithm '", name_, "' on rank ", rank(),
              " comes between a forward and its backward, which needs the weights as they are: call it after the "
              "backward. If none is to follow, let go of what the forward returned (del loss) before");
}

void HookRunner::afterStep() {
  checkCapture(parameters_);
  happen(StepEvent::kOptimizerStep);
}

void HookRunner::synchronize() {
  const at::NoGradGuard noGrad;
  auto* const onWeights = algorithm_->as<ActsOnWeights>();
  if (onWeights == nullptr) return;
  countSkippedStep();
  checkThatAllCan("synchronize()", kOfSynchronizing, {.text = "synchronize()", .detail = ""});
  onWeights->synchronize(*this);
}

RunsInBackground& HookRunner::inBackground(const char* call) const {
  auto* const background = algorithm_->as<RunsInBackground>();
  TORCH_CHECK(background != nullptr, call, " is for algorithms that communicate in the background; '", name_,
              "' does not");
  return *background;
}

bool HookRunner::abort() {
  const at::NoGradGuard noGrad;
  countSkippedStep();
  return inBackground("abort()").abort(*this);
}

void HookRunner::endWithin(std::chrono::milliseconds limit) {
  const at::NoGradGuard noGrad;
  if (auto* const background = algorithm_->as<RunsInBackground>()) background->endWithin(*this, limit);
}

bool HookRunner::resume() { return inBackground("resume()").resume(*this); }

void HookRunner::leave(const Belongings& belongings) {
  const at::NoGradGuard noGrad;
  if (auto* const onWeights = algorithm_->as<ActsOnWeights>()) makeEqual(*onWeights, belongings);
  const Options options(kSuccessor, AlgorithmRegistry::find(kSuccessor).options, {});
  take(create(kSuccessor, {}), configurationOf(kSuccessor, options));
  actsOnWeights_ = false;
  host_.reset();
  noteMemory({});
  forwards_.clear();
}

void HookRunner::checkThatAllCan(const char* call) { checkThatAllCan(call, kOfAborting, {.text = call, .detail = ""}); }

void HookRunner::checkThatAllCan(const char* call, const AgreementWords& words, Registration own) {
  const at::Device device = parameters_.front().device();
  if (countsSteps()) own.text += c10::str(" after step ", algorithm_->as<ActsOnWeights>()->commonStep());
  try {
    checkWeightsAreFree(call);
  } catch (...) {
    // The other ranks may have found nothing wrong and wait for this one.
    agreeOn({}, words, meetingGroup(), device);
    throw;
  }
  agreeOn(own, words, meetingGroup(), device);
}

void HookRunner::makeEqual(ActsOnWeights& onWeights, const Belongings& belongings) {
  checkThatAllCan("remove()", kOfLeaving, {belongings.moment, belongings.shapes});
  onWeights.synchronize(*this);
  averageTensors(*this, belongings.gradients);
  broadcastTensors(*this, belongings.state);
}

void HookRunner::load(const AlgorithmState& state, BucketLayout layout, int64_t step) {
  TORCH_CHECK_VALUE(step >= 0, "bagua: the checkpoint was written after ", step, " steps");
  layouts_.check(layout);
  AlgorithmState own = state;
  const bool wasStepSkipped = countsSteps() && own.erase(kStepSkipped) > 0;
  auto* const keeps = algorithm_->as<KeepsState>();
  TORCH_CHECK_VALUE(keeps != nullptr || own.empty(), "bagua: algorithm '", name_,
                    "' has no state, the checkpoint holds '", own.begin()->first, "'");
  if (keeps != nullptr) keeps->load(own, *this);
  if (countsSteps()) tracker_.load(wasStepSkipped);
  layouts_.want(std::move(layout));
  step_ = step;
}

void HookRunner::rescale(double factor) {
  const at::NoGradGuard noGrad;
  auto* const residuals = algorithm_->as<KeepsResiduals>();
  TORCH_CHECK(residuals != nullptr, "rescale() is for algorithms with error feedback of gradients; '", name_,
              "' remembers no gradients, and needs no rescale() or follow()");
  TORCH_CHECK_VALUE(std::isfinite(factor) && factor > 0, "bagua: rescale() takes a factor above 0, got ", factor);
  if (factor != 1) residuals->rescale(factor);
}

// The script has saved the weights, or is about to: a skipped step changes them at the next forward. What other ranks
// wait for begins now.
AlgorithmState HookRunner::state() {
  const auto* const keeps = algorithm_->as<KeepsState>();
  if (keeps == nullptr) return {};
  lookForSkippedStepAtEnd();
  happen(StepEvent::kCheckpoint);
  AlgorithmState state = keeps->state();
  if (tracker_.owesSkippedStep()) state.emplace(kStepSkipped, counterTensor(1));
  return state;
}

HookStats HookRunner::stats() const {
  std::shared_ptr<const Algorithm> algorithm;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    algorithm = algorithm_;
  }
  HookStats stats = ledger_->stats();
  if (const auto* const keeps = algorithm->as<KeepsState>()) stats.stateBytes = keeps->stateBytes();
  return stats;
}

}  // namespace bagua
