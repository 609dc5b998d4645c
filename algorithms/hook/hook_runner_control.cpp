// SPDX-License-Identifier: Apache-2.0
// The ranks of a hook agree before the first step; the user's handle asks the rest of it between two steps, and its
// ranks may change there.
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <exception>
#include <functional>
#include <utility>

#include "algorithms/hook/hook_runner.h"
#include "algorithms/registry.h"
#include "algorithms/shared/weights.h"
#include "backend/operation/hash.h"

namespace bagua {
namespace {

// An operation that has failed returns within milliseconds, except on a machine that is much too busy.
constexpr std::chrono::seconds kAbortTime{60};

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

uint32_t hashOfTable(const at::Tensor& table) {
  if (!table.defined()) return 0;
  const at::Tensor bytes = table.cpu().contiguous();
  return static_cast<uint32_t>(hashOf({static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()}));
}

// The ranks of another group, if there is one, are told where `call` throws: they may have found nothing wrong, and
// wait for this one.
void passingOn(const std::function<void()>& call, ExecutorProvider* others, at::Device device) {
  try {
    call();
  } catch (...) {
    const auto error = std::current_exception();
    try {
      if (others != nullptr) agreeOn({}, kOfRegistration, *others, device);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): what `call` threw says why
    }
    std::rethrow_exception(error);
  }
}

}  // namespace

void HookRunner::agree(const std::string& parameters, const std::string& optimizer, at::Device device,
                       const std::string& arithmetic) {
  const std::string use = watchesUse() ? " with find_unused_parameters or static_graph" : "";
  const bool goesByLinear = algorithm_->as<ReadsOptimizer>() != nullptr && isOptimizerLinear_.value_or(false);
  const std::string kind = goesByLinear ? " for an optimizer such as SGD" : "";
  const bool needsLikeDevices = AlgorithmRegistry::find(name_).needsLikeDevices;
  const Registration own{name_ + "(" + options_.toString() + ")" + use + kind + optimizer, parameters};
  // Whoever hears that a rank refuses, or has something else, passes that on to its other group. The members are on all
  // hosts, so that what they find has reached every rank when the shards agree once more.
  const auto amongShards = [&] {
    if (shards_) agreeOn(own, kOfRegistration, *shards_, device);
  };
  passingOn(amongShards, &members_.group(), device);
  passingOn([&] { members_.agree(own, needsLikeDevices ? arithmetic : "", device); }, shards_.get(), device);
  amongShards();
  begin();
}

void HookRunner::checkMembers() const {
  // It remembers weights of the former members, and the groups of its own consist of them.
  TORCH_CHECK(!actsOnWeights_ || !haveMembersChanged(), "bagua: algorithm '", name_, "' cannot go on on rank ", rank(),
              " of ", size(),
              ", whose group has other members now, with which it begins again at the next forward of its model: "
              "where that fails, call handle.remove(), and register another one");
}

void HookRunner::followMembers(at::Device device) {
  if (!members_.haveChanged()) return;
  checkMembers();
  awaitFormerPrograms();
  step_ = members_.meetAgain(step_, *configuration_, device).step;
  if (!hasLeft_) takeAgain();
  members_.follow();
}

void HookRunner::abortOwnGroups() {
  constexpr const char* kReason = "a rank has left the step by an error";
  if (backgroundExecutor_) backgroundExecutor_->abort(kReason);
  abortHost(kReason);
}

void HookRunner::abortHost(const char* reason) {
  if (host_) host_->executorFor(parameters_.front().device())->abort(reason);
}

void HookRunner::awaitFormerPrograms() {
  TORCH_CHECK_WITH(DistBackendError, ledger_->waitForPrograms(kAbortTime), "bagua: on rank ", rank(), " of ", size(),
                   " an operation among the former members has not returned within ", kAbortTime.count(),
                   " s, and may yet write into a gradient");
}

void HookRunner::takeAgain() {
  take(name_, options_.values());
  useParameters(facts_);
  if (isOptimizerLinear_) useOptimizer(*isOptimizerLinear_);
}

int HookRunner::meetAgain() {
  const at::NoGradGuard noGrad;
  // An exchange among living members ends, one in which a dead one has a part fails. Both leave the weights alone.
  if (backgroundExecutor_) backgroundExecutor_->shutdown();
  abortHost("the members of the model's group have changed");
  awaitFormerPrograms();
  const auto furthest = members_.meetAgain(step_, *configuration_, parameters_.front().device());
  furthestStep_ = furthest.step;
  return furthest.rank;
}

AlgorithmState HookRunner::shared() const {
  const auto* const onWeights = algorithm_->as<ActsOnWeights>();
  return onWeights != nullptr ? onWeights->shared() : AlgorithmState();
}

void HookRunner::beginAgain(const AlgorithmState& shared) {
  const at::NoGradGuard noGrad;
  const std::shared_ptr<Algorithm> former = algorithm_;
  members_.follow();
  step_ = furthestStep_;
  // A backward that no step has followed counts on no rank: some may have had none.
  tracker_.load(/*owesSkippedStep=*/false);
  // Its members may share a host no more.
  host_.reset();
  hasToBegin_ = true;
  takeAgain();
  try {
    if (auto* const onWeights = algorithm_->as<ActsOnWeights>()) onWeights->useModel(*this);
    if (!shared.empty()) algorithm_->as<KeepsState>()->load(shared, *this);
  } catch (...) {
    // It can still make the weights equal, in leave(), where all are at the same step.
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      algorithm_ = former;
    }
    if (!shared.empty()) algorithm_->as<KeepsState>()->load(shared, *this);
    throw;
  }
}

void HookRunner::checkWeightsAreFree(const char* call) const {
  TORCH_CHECK(!forwards_.any(), "bagua: ", call, " of algorithm '", name_, "' on rank ", rank(),
              " comes between a forward and its backward, which needs the weights as they are: call it after the "
              "backward. If none is to follow, let go of what the forward returned (del loss) before");
}

void HookRunner::synchronize() {
  const at::NoGradGuard noGrad;
  auto* const onWeights = algorithm_->as<ActsOnWeights>();
  if (onWeights == nullptr) return;
  checkMembers();
  countSkippedStep();
  checkThatAllCan("synchronize()", kOfSynchronizing, {.text = "synchronize()", .detail = ""});
  onWeights->synchronize(*this);
}

RunsInBackground& HookRunner::inBackground(const char* call) const {
  checkMembers();
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
  // Former members are not at their end.
  if (members_.haveChanged()) return;
  if (auto* const background = algorithm_->as<RunsInBackground>()) background->endWithin(*this, limit);
}

bool HookRunner::resume() { return inBackground("resume()").resume(*this); }

void HookRunner::leave(const Belongings& belongings) {
  const at::NoGradGuard noGrad;
  auto* const onWeights = algorithm_->as<ActsOnWeights>();
  // Other members know nothing of what this rank has to make equal.
  if (onWeights != nullptr && !members_.haveChanged()) makeEqual(*onWeights, belongings);
  members_.dissolve();
  take(kSuccessor, {});
  hasLeft_ = true;
  actsOnWeights_ = false;
  host_.reset();
  noteMemory({});
  noteChosen({});
  forwards_.clear();
}

void HookRunner::checkThatAllCan(const char* call) { checkThatAllCan(call, kOfAborting, {.text = call, .detail = ""}); }

void HookRunner::checkThatAllCan(const char* call, const AgreementWords& words, Registration own) {
  const at::Device device = parameters_.front().device();
  if (countsSteps()) own.text += c10::str(" after step ", algorithm_->as<ActsOnWeights>()->commonStep());
  passingOn([&] { checkWeightsAreFree(call); }, &meetingGroup(), device);
  agreeOn(own, words, meetingGroup(), device);
}

void HookRunner::makeEqual(ActsOnWeights& onWeights, const Belongings& belongings) {
  checkThatAllCan("remove()", kOfLeaving, {belongings.moment, belongings.shapes});
  onWeights.synchronize(*this);
  averageTensors(*this, belongings.gradients);
  broadcastTensors(*this, belongings.state);
}

void HookRunner::load(const AlgorithmState& state, BucketLayout layout, int64_t step, const at::Tensor& guardTable) {
  TORCH_CHECK_VALUE(step >= 0, "bagua: the checkpoint was written after ", step, " steps");
  TORCH_CHECK(!members_.haveChanged(), "bagua: the members of the group have changed, and with the next step the ",
              "algorithm begins anew: load a state before the change, or after that step");
  layouts_.check(layout);
  Guard::check(guardTable, static_cast<int64_t>(parameters_.size()));
  AlgorithmState own = state;
  const bool wasStepSkipped = countsSteps() && own.erase(kStepSkipped) > 0;
  awaitAgreement();
  auto* const keeps = algorithm_->as<KeepsState>();
  TORCH_CHECK_VALUE(keeps != nullptr || own.empty(), "bagua: algorithm '", name_,
                    "' has no state, the checkpoint holds '", own.begin()->first, "'");
  if (keeps != nullptr) keeps->load(own, *this);
  auto* const isGuarded = algorithm_->as<IsGuarded>();
  if (isGuarded != nullptr) isGuarded->guard().load(guardTable);
  loadedGuardHash_ = isGuarded != nullptr && isGuarded->guard().adapts() ? hashOfTable(guardTable) : 0;
  loadedStep_ = step;
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
  awaitAgreement();
  if (factor != 1) residuals->rescale(factor);
}

// The script has saved the weights, or is about to: a skipped step changes them at the next forward. What other ranks
// wait for begins now.
AlgorithmState HookRunner::state() {
  const auto* const keeps = algorithm_->as<KeepsState>();
  if (keeps == nullptr) return {};
  awaitAgreement();
  lookForSkippedStepAtEnd();
  happen(StepEvent::kCheckpoint);
  AlgorithmState state = keeps->state();
  if (tracker_.owesSkippedStep()) state.emplace(kStepSkipped, counterTensor(1));
  return state;
}

at::Tensor HookRunner::guardTable() const {
  auto* const isGuarded = algorithm_->as<IsGuarded>();
  return isGuarded != nullptr ? isGuarded->guard().state() : at::Tensor();
}

HookStats HookRunner::stats() const {
  std::shared_ptr<Algorithm> algorithm;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    algorithm = algorithm_;
  }
  HookStats stats = ledger_->stats();
  if (const auto* const keeps = algorithm->as<KeepsState>()) stats.stateBytes = keeps->stateBytes();
  if (auto* const isGuarded = algorithm->as<IsGuarded>()) stats.guard = isGuarded->guard().report();
  return stats;
}

}  // namespace bagua
