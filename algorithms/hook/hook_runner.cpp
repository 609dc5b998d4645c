// SPDX-License-Identifier: Apache-2.0
#include "algorithms/hook/hook_runner.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <utility>

#include "algorithms/capture.h"
#include "algorithms/hook/profiler_handover.h"
#include "algorithms/registry.h"
#include "algorithms/shared/weights.h"
#include "backend/operation/sparse_reduction.h"
#include "kernels/codec.h"

namespace bagua {
namespace {

// Of all that algorithms draw at random.
constexpr uint64_t kSeed = 0;

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
// Throws where the option "codec", one codec or "pattern=codec, ...", names one that takes no tensors of that device.
void checkCodecs(const std::string& algorithm, const Options& options, at::Device device) {
  const auto option = options.values().find("codec");
  if (option == options.values().end() || !std::holds_alternative<std::string>(option->second)) return;
  std::istringstream entries(std::get<std::string>(option->second));
  for (std::string entry; std::getline(entries, entry, ',');) {
    const auto begin = entry.find_first_not_of(' ', entry.find('=') + 1);
    if (begin == std::string::npos) continue;
    const std::string name = entry.substr(begin, entry.find_last_not_of(' ') - begin + 1);
    CodecRegistry::find(name).checkDevice(device, c10::str("bagua: algorithm '", algorithm, "'"));
  }
}

c10::intrusive_ptr<c10::ivalue::Future> completedFuture(const at::Tensor& value) {
  std::vector<c10::Device> devices;
  if (!value.is_cpu()) devices.push_back(value.device());
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
  future->markCompleted(c10::IValue(std::vector<at::Tensor>{value}));
  return future;
}

// Others after any change of a gradient.
std::vector<std::pair<const void*, uint32_t>> marksOfGradients(const std::vector<at::Tensor>& parameters) {
  std::vector<std::pair<const void*, uint32_t>> marks;
  marks.reserve(parameters.size());
  for (const auto& parameter : parameters) {
    const at::Tensor& gradient = parameter.grad();
    const bool isCounted = gradient.defined() && !gradient.is_inference();
    marks.emplace_back(gradient.unsafeGetTensorImpl(), isCounted ? static_cast<uint32_t>(gradient._version()) : 0);
  }
  return marks;
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
      countsSteps_(AlgorithmRegistry::find(algorithm).runsInBackground &&
                   !AlgorithmRegistry::find(algorithm).stepsMayDiffer),
      isFirstStatic_(isStaticGraph),
      layouts_(parameters_, isStaticGraph ? 2 : 1),
      algorithm_(create(algorithm, options)),
      configuration_(configurationOf(name_, options_)) {
  if (!parameters_.empty()) checkCodecs(name_, options_, parameters_.front().device());
}

void HookRunner::useModel(std::vector<int64_t> layers, std::vector<at::Tensor> buffers) {
  layers_ = std::move(layers);
  buffers_ = std::move(buffers);
  algorithm_->useModel(*this);
}

// The first program connects the ranks, for which they wait for each other: here and not in a training step.
void HookRunner::useBackground(std::shared_ptr<ExecutorProvider> group) {
  background_ = std::move(group);
  submitInBackground("bagua:connect", {parameters_.front()}, [](Communicator& communicator, StageSeconds&) {
    communicator.barrier();
  })->wait(kNoTimeout);
}

void HookRunner::useTopology() {
  const HostTopology& topology = group_->topology();
  spansHosts_ = topology.hostCount() > 1;
  hostRanks_ = topology.ranksOf(topology.hostOf(rank()));
  algorithm_->useTopology(topology);
}

c10::intrusive_ptr<c10::ivalue::Future> HookRunner::run(c10d::GradBucket& gradients) {
  TORCH_CHECK(isAnnounced_ || !actsOnWeights_, "bagua: algorithm '", name_, "' has not seen the forward of this ",
              "backward on rank ", rank(),
              ": call the DistributedDataParallel model itself, not its forward(), and in "
              "training mode (to freeze parts of it, put those in evaluation mode)");
  const at::Tensor& buffer = gradients.getBuffer();
  if (parameters_.empty()) checkCodecs(name_, options_, buffer.device());
  const bool isLast = gradients.isLast() || isFirstStatic_;
  isFirstStatic_ = false;
  if (isLast && actsOnWeights_) queueAfterBackward();
  auto entries = layouts_.entriesOf(gradients);
  const bool tellsUse = findUse(gradients, entries);
  const auto work = reduceBucket(buffer, entries, gradients.getIndex() == 0, isLast, tellsUse);
  return work ? work->getFuture() : completedFuture(buffer);
}

// Where the model is not known, nor what it told DDP, an unused parameter is one without .grad.
bool HookRunner::findUse(const c10d::GradBucket& gradients, std::vector<BucketEntry>& entries) {
  if (use_) {
    for (auto& entry : entries) entry.isUsed = use_->take(entry.parameter);
    return true;
  }
  if (!parameters_.empty() || entries.empty()) return false;
  const auto parameters = gradients.getParameters();
  for (size_t i = 0; i < entries.size(); ++i) entries[i].isUsed = parameters[i].grad().defined();
  return true;
}

c10::intrusive_ptr<c10d::Work> HookRunner::reduceBucket(const at::Tensor& flat, const std::vector<BucketEntry>& entries,
                                                        bool isFirst, bool isLast, bool tellsUse) {
  checkCapture({flat});
  const auto parts = layouts_.partsOf(entries);
  layouts_.note(parts, isFirst, isLast);
  if (isFirst) ++step_;
  const bool travels = algorithm_->reducesGradients();
  {
    const std::lock_guard<std::mutex> lock(ledger_->mutex);
    ++ledger_->stats.buckets;
    if (isLast) ledger_->countStep();
    if (isLast && travels) ++ledger_->stats.rounds;
  }
  if (!travels) return {};
  // The end of backward waits for it.
  const auto wait = algorithm_->bucketsMayOverlap() ? Wait::kNowInAnyOrder : Wait::kNow;
  return submitTo(
      host_ ? *host_ : *group_, "bagua:reduce_bucket", {flat}, wait,
      [algorithm = algorithm_, handover = Handover{flat, entries, parts, step_ - 1, tellsUse}](
          Communicator& communicator, StageSeconds& seconds) mutable {
        reduce(*algorithm, handover, communicator, seconds);
      },
      layouts_.gradientsOf(parts));
}

void HookRunner::reduce(Algorithm& algorithm, Handover& handover, Communicator& communicator, StageSeconds& seconds) {
  auto& [gradients, whole, parts, step, tellsUse, retained] = handover;
  const auto reduceBucket = [&algorithm, &communicator, &seconds, &kept = retained, knowsUse = tellsUse](
                                Bucket& bucket, int64_t number) {
    bucket.step = number;
    bucket.tellsUse = knowsUse;
    bucket.retained = kept;
    bucket.key = bucketKey(kSeed, number, bucket.entries);
    algorithm.reduce(bucket, communicator);
    seconds.take(bucket.seconds);
  };
  if (gradients.is_sparse()) {
    const Stage stage(seconds, "sparse_allreduce");
    allReduceSparse(communicator, gradients, algorithm.averages());
    return algorithm.endSparse(gradients._values(), step);
  }
  if (parts.size() == 1 && isSameOrder(parts[0], whole)) {
    Bucket bucket{.flat = gradients, .entries = whole};
    return reduceBucket(bucket, step);
  }
  for (const auto& part : parts) {
    Bucket bucket = gatherPart(part);
    reduceBucket(bucket, step);
    scatterPart(bucket, part);
  }
}

// Before DDP's own end of backward, which is queued after the last bucket; after it in the first step of a static
// graph.
void HookRunner::queueAfterBackward() {
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] { self->afterBackward(); });
}

void HookRunner::atBackward(bool isBypassed) {
  isStepCounted_ = false;
  // Also of a backward under no_sync(), after which the gradients are no longer gone.
  if (isBeforeStep_ && haveGradientsGone()) wasStepSkipped_ = true;
  // That of a forward under no_sync() is else none of ours.
  if (!isAnnounced_ || !isBypassed) return;
  ++step_;
  {
    const std::lock_guard<std::mutex> lock(ledger_->mutex);
    ledger_->countStep();
  }
  queueAfterBackward();
}

bool HookRunner::haveGradientsGone() const {
  const at::NoGradGuard noGrad;
  // As the backward has left them, though they may be zero.
  if (marksOfGradients(parameters_) == marks_) return false;
  return std::none_of(parameters_.begin(), parameters_.end(), [](const at::Tensor& parameter) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) return false;
    return gradient.is_sparse() ? gradient._nnz() > 0 : gradient.any().item<bool>();
  });
}

bool HookRunner::isStepSkipped() const {
  if (!countsSteps_) return false;
  if (wasStepSkipped_) return true;
  if (!isBeforeStep_ || forwards_.any()) return false;
  const at::NoGradGuard noGrad;
  const bool areFinite = std::all_of(parameters_.begin(), parameters_.end(), [](const at::Tensor& parameter) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) return true;
    return at::isfinite(gradient.is_sparse() ? gradient._values() : gradient).all().item<bool>();
  });
  return !areFinite || haveGradientsGone();
}

void HookRunner::countSkippedStep() {
  if (!isStepSkipped()) return;
  wasStepSkipped_ = true;
  tellOfSkippedStep();
  isStepCounted_ = true;
}

void HookRunner::tellOfSkippedStep() {
  if (!std::exchange(wasStepSkipped_, false)) return;
  isBeforeStep_ = false;
  const at::NoGradGuard noGrad;
  algorithm_->afterSkippedStep(*this);
}

// Also where nothing travels: a graph that was captured in such a step would leave out what others send.
void HookRunner::checkCapture(const std::vector<at::Tensor>& tensors) const {
  if (tensors.empty() || !group_->isCapturing(tensors.front().device()) || algorithm_->isReplayable()) return;
  refuseCapture(*group_, tensors.front().device(), "algorithm ", *configuration_);
}

void HookRunner::afterBackward() {
  checkCapture(parameters_);
  const at::NoGradGuard noGrad;
  isAnnounced_ = false;
  tellOfSkippedStep();
  isBeforeStep_ = true;
  isStepCounted_ = false;
  if (countsSteps_) marks_ = marksOfGradients(parameters_);
  forwards_.clear();
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
                                                    const std::vector<at::Tensor>& tensors, Wait wait, Task task,
                                                    std::shared_ptr<const GradientList> gradients) {
  const at::Tensor& first = tensors.front();
  int64_t numel = 0;
  for (const auto& tensor : tensors) numel += tensor.numel();
  {
    const std::lock_guard<std::mutex> lock(ledger_->mutex);
    ledger_->stats.logicalBytes += bytesOfAll(tensors);
  }
  const int64_t step = algorithm_->sendsByStep() ? step_ : algorithm_->commonStep();
  const Operation operation{
      .type = c10d::OpType::ALLREDUCE,
      .name = name,
      .dtype = first.scalar_type(),
      .numel = numel,
      .timeout = group.timeout(),
      .mayOverlap = wait == Wait::kNowInAnyOrder && (first.is_cpu() || algorithm_->keepsNothing()),
      .isProfiled = wait != Wait::kLater,
      .configuration = configuration_,
      .gradients = std::move(gradients),
      .step = static_cast<uint32_t>(step)};
  const auto handover = wait != Wait::kLater ? ProfilerHandover::ofThisThread() : ProfilerHandover();
  auto program = [ledger = ledger_, handover, task = std::move(task)](Communicator& communicator) {
    const ProfilerHandover::Scope profiled(handover);
    const Traffic before = communicator.traffic();
    StageSeconds seconds;
    task(communicator, seconds);
    const std::lock_guard<std::mutex> lock(ledger->mutex);
    ledger->stats.traffic += communicator.traffic().since(before);
    ledger->seconds.take(seconds);
  };
  return group.executorFor(first.device()).submit(operation, tensors, std::move(program));
}

void HookRunner::countRound() {
  const std::lock_guard<std::mutex> lock(ledger_->mutex);
  ++ledger_->stats.rounds;
}

void HookRunner::noteMemory(std::map<std::string, int64_t> bytes) {
  const std::lock_guard<std::mutex> lock(ledger_->mutex);
  ledger_->stats.memory = std::move(bytes);
}

void HookRunner::beforeForward(std::vector<Momentum> momenta) {
  checkCapture(parameters_);
  const at::NoGradGuard noGrad;
  if (countsSteps_ && isBeforeStep_ && haveGradientsGone()) wasStepSkipped_ = true;
  tellOfSkippedStep();
  algorithm_->useMomenta(std::move(momenta));
  algorithm_->beforeForward(*this);
  isAnnounced_ = true;
}

void HookRunner::checkWeightsAreFree(const char* call) const {
  TORCH_CHECK(!forwards_.any(), "bagua: ", call, " of algorithm '", name_, "' on rank ", rank(),
              " comes between a forward and its backward, which needs the weights as they are: call it after the "
              "backward. If none is to follow, let go of what the forward returned (del loss) before");
}

void HookRunner::afterStep() {
  checkCapture(parameters_);
  const at::NoGradGuard noGrad;
  tellOfSkippedStep();
  isBeforeStep_ = false;
  if (std::exchange(isStepCounted_, false)) return;
  algorithm_->afterStep(*this);
}

void HookRunner::synchronize() {
  const at::NoGradGuard noGrad;
  if (AlgorithmRegistry::find(name_).agreement != Agreement::kEventual) return;
  countSkippedStep();
  checkThatAllCan("synchronize()", kOfSynchronizing, {.text = "synchronize()", .detail = ""});
  algorithm_->synchronize(*this);
}

bool HookRunner::abort() {
  const at::NoGradGuard noGrad;
  countSkippedStep();
  return algorithm_->abort(*this);
}

void HookRunner::endWithin(std::chrono::milliseconds limit) {
  const at::NoGradGuard noGrad;
  algorithm_->endWithin(*this, limit);
}

bool HookRunner::resume() { return algorithm_->resume(*this); }

void HookRunner::leave(const Belongings& belongings) {
  const at::NoGradGuard noGrad;
  if (AlgorithmRegistry::find(name_).agreement == Agreement::kEventual) makeEqual(belongings);
  algorithm_ = create(kSuccessor, {});
  configuration_ = configurationOf(kSuccessor, Options(kSuccessor, AlgorithmRegistry::find(kSuccessor).options, {}));
  actsOnWeights_ = false;
  countsSteps_ = false;
  host_.reset();
  noteMemory({});
  forwards_.clear();
}

void HookRunner::checkThatAllCan(const char* call) { checkThatAllCan(call, kOfAborting, {.text = call, .detail = ""}); }

void HookRunner::checkThatAllCan(const char* call, const AgreementWords& words, Registration own) {
  const at::Device device = parameters_.front().device();
  if (countsSteps_) own.text += c10::str(" after step ", algorithm_->commonStep());
  try {
    checkWeightsAreFree(call);
  } catch (...) {
    // The other ranks may have found nothing wrong and wait for this one.
    agreeOn({}, words, meetingGroup(), device);
    throw;
  }
  agreeOn(own, words, meetingGroup(), device);
}

void HookRunner::makeEqual(const Belongings& belongings) {
  checkThatAllCan("remove()", kOfLeaving, {belongings.moment, belongings.shapes});
  algorithm_->leave(*this);
  averageTensors(*this, belongings.gradients);
  broadcastTensors(*this, belongings.state);
}

void HookRunner::load(const AlgorithmState& state, BucketLayout layout, int64_t step) {
  TORCH_CHECK_VALUE(step >= 0, "bagua: the checkpoint was written after ", step, " steps");
  layouts_.check(layout);
  AlgorithmState own = state;
  const bool wasStepSkipped = countsSteps_ && own.erase(kStepSkipped) > 0;
  algorithm_->load(own, *this);
  if (countsSteps_) {
    isBeforeStep_ = isStepCounted_ = false;
    wasStepSkipped_ = wasStepSkipped;
  }
  layouts_.want(std::move(layout));
  step_ = step;
}

void HookRunner::rescale(double factor) {
  const at::NoGradGuard noGrad;
  TORCH_CHECK(algorithm_->keepsResiduals(), "rescale() is for algorithms with error feedback of gradients; '", name_,
              "' remembers no gradients, and needs no rescale() or follow()");
  TORCH_CHECK_VALUE(std::isfinite(factor) && factor > 0, "bagua: rescale() takes a factor above 0, got ", factor);
  if (factor != 1) algorithm_->rescale(factor);
}

// The script has saved the weights, or is about to: a skipped step changes them at the next forward. What other ranks
// wait for begins now.
AlgorithmState HookRunner::state() {
  if (!isStepSkipped()) return algorithm_->state();
  const at::NoGradGuard noGrad;
  wasStepSkipped_ = isStepCounted_ = true;
  algorithm_->beginSkippedStep(*this);
  AlgorithmState state = algorithm_->state();
  state.emplace(kStepSkipped, counterTensor(1));
  return state;
}

HookStats HookRunner::stats() const {
  const std::lock_guard<std::mutex> lock(ledger_->mutex);
  HookStats stats = ledger_->stats;
  stats.seconds = ledger_->seconds.totals();
  stats.stateBytes = algorithm_->stateBytes();
  return stats;
}

void HookRunner::resetStats() {
  const std::lock_guard<std::mutex> lock(ledger_->mutex);
  auto memory = std::move(ledger_->stats.memory);
  ledger_->stats = {};
  ledger_->seconds.reset();
  ledger_->stats.memory = std::move(memory);
}

}  // namespace bagua
