// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>
#include <vector>

#include "algorithms/algorithm.h"
#include "algorithms/algorithm_interfaces.h"
#include "algorithms/hook/agreement.h"
#include "algorithms/hook/bucket_layout.h"
#include "algorithms/hook/bucket_program.h"
#include "algorithms/hook/gradients_left.h"
#include "algorithms/hook/hook_ledger.h"
#include "algorithms/hook/hook_members.h"
#include "algorithms/hook/outstanding_forwards.h"
#include "algorithms/hook/parameter_use.h"
#include "algorithms/hook/step_tracker.h"
#include "backend/executor.h"

namespace bagua {

// An algorithm at work on one model: turns each bucket that DDP hands over into a program, and tells the algorithm how
// far a step has come (StepTracker says how far that is). Shared by the Reducer's hook and the handle that the user
// holds. run() is called on a thread of the backward; stats(), resetStats() and what is const of the registration may
// be called from any thread at any time; the others from the one that trains.
//
// Its life: made, told of the model, agreed upon by the ranks, begun; steps; left. After leave() it averages gradients
// in full precision.
class HookRunner final : public std::enable_shared_from_this<HookRunner>, private StepContext {
 public:
  // Without `parameters` it serves algorithms that only know gradients. `isStaticGraph`: of the DDP model.
  HookRunner(const std::string& algorithm, const std::map<std::string, OptionValue>& options,
             std::shared_ptr<ExecutorProvider> group, std::vector<at::Tensor> parameters, bool isStaticGraph = false);
  // What StepContext tells of the model besides its parameters; before the ranks agree.
  void useModel(std::vector<int64_t> layers, std::vector<at::Tensor> buffers);
  // For DDP models that keep from the optimizer what no rank has used; before the ranks agree.
  void watchUse() { use_.emplace(parameters_); }
  [[nodiscard]] bool watchesUse() const { return use_.has_value(); }
  // For algorithms that declare runsInBackground, before the first step, and among other members. Collective.
  void useBackground(std::shared_ptr<ExecutorProvider> group);

  // Called by DDP for every bucket of every step, on an autograd thread. The future holds the tensor that DDP copies
  // the gradients from: the bucket's own buffer. Where the exchange fails at once, so does the future, as DDP can be
  // used again only after a backward in which every bucket had one.
  c10::intrusive_ptr<c10::ivalue::Future> run(c10d::GradBucket& gradients);

  // The same for gradients of another source than DDP: `isFirst` and `isLast` of a step. No work where the gradients
  // stay as they are. The end of backward has then to be told through afterBackward(), and endStep() follows the last
  // bucket where nobody knew that it was the last.
  c10::intrusive_ptr<c10d::Work> reduceBucket(const at::Tensor& flat, const std::vector<BucketEntry>& entries,
                                              bool isFirst, bool isLast);
  void endStep();
  // The same of a flat tensor with a part for each rank, of which this rank's goes to `own`, see ReducesToParts.
  c10::intrusive_ptr<c10d::Work> reduceToParts(const at::Tensor& flat, const at::Tensor& own,
                                               const std::vector<BucketEntry>& entries, bool isFirst);
  // An algorithm that keeps residuals hears of parameters for which no rank has gradients in the step at hand, though
  // they had some before. `isInParts`: they are reduced to parts.
  c10::intrusive_ptr<c10d::Work> passOver(const at::Tensor& flat, const std::vector<BucketEntry>& entries,
                                          bool isInParts);
  void afterBackward();

  // Has the ranks agree, and the algorithm begin. Collective. Each throws ValueError unless all have registered the
  // same, on `parameters` and an `optimizer` of which the same is said.
  void agree(const std::string& parameters, const std::string& optimizer, at::Device device,
             const std::string& arithmetic);
  // Once the ranks have agreed; when they do so again, nothing is left to do.
  void begin();
  // An algorithm that acts on weights may get other members between two steps like this, on all of them: they meet,
  // the furthest rank tells the others its shared(), all begin again with that, make the groups that it needs, and call
  // endChange(). Until then, and where one of these throws, the next forward is refused, or begins the change anew.
  // meetAgain() ends what is on its way among the former members; it returns the furthest rank. Collective.
  [[nodiscard]] bool haveMembersChanged() const { return members_.haveChanged() || hasToBegin_; }
  int meetAgain();
  [[nodiscard]] AlgorithmState shared() const;
  void beginAgain(const AlgorithmState& shared);
  void endChange() { hasToBegin_ = false; }
  // Ends the waits of other ranks, where this one leaves a step by an error: they may wait in the groups that only the
  // algorithm has, those of its host for its gradients, all of them for its part of an exchange.
  void abortOwnGroups();
  // Before the first step, where they are known.
  void useParameters(const std::vector<ParameterFacts>& facts);
  // The same; see ReadsOptimizer. The ranks compare it where the algorithm goes by it.
  void useOptimizer(bool isLinear);
  // Whether gradients travel between hosts, where they had better leave early and in small buckets. Not on a GPU: its
  // buckets travel one after another, each with a delay of its own, and many small ones would add up more of those.
  [[nodiscard]] bool wantsSmallBuckets() const {
    return members_.topology()->hostCount() > 1 && areOnCpu() && scope() == GradientScope::kAllRanks;
  }
  // The ranks of this host, where gradients stay inside it, else none. After begin().
  [[nodiscard]] std::vector<int> hostRanks() const;
  // The ranks that hold the other parts of what this rank has gradients of; before agree().
  void useShards(std::shared_ptr<ExecutorProvider> group) { shards_ = std::move(group); }
  // A group of these; before the first step.
  void useHost(std::shared_ptr<ExecutorProvider> group) { host_ = std::move(group); }
  // Whether DDP has to gather the gradients of the step at hand.
  [[nodiscard]] bool reducesGradients() const { return scope() != GradientScope::kNone; }
  void beforeForward(std::vector<Momentum> momenta);
  // The end of such a forward: what it returned.
  void afterForward(const std::vector<at::Tensor>& outputs) { forwards_.add(outputs); }
  // The start of a backward, on the thread that computes the first gradient, before any is added to what is there. Of a
  // backward that `isBypassed` DDP hands over nothing.
  void atBackward(bool isBypassed);
  void afterStep();
  // Of an end, where no forward or backward follows that would show it: counts a step that was skipped. Its gradients
  // are gone, or not finite, as GradScaler leaves them.
  void countSkippedStep();
  // Whether a synchronised backward has come since the optimizer's last step.
  [[nodiscard]] bool isBeforeStep() const { return tracker_.isPending(); }
  // Throws on all ranks, and changes nothing, unless all of them can. Collective.
  void synchronize();
  bool abort();
  bool resume();
  void endWithin(std::chrono::milliseconds limit);
  // What a model of its own has on every rank, where ranks differ: the optimizer's state, and the gradients that it has
  // not taken yet. `moment` and `shapes` tell ranks apart that are not at the same place.
  struct Belongings {
    std::string moment;
    std::string shapes;
    std::vector<at::Tensor> state;
    std::vector<at::Tensor> gradients;
  };
  // From the next bucket on the gradients are averaged in full precision, as by DDP without a hook. Where ranks may
  // differ it makes them equal: weights and gradients are averaged, the optimizer's state is rank 0's. Throws on all
  // ranks, and changes nothing, unless all of them can leave. Collective.
  void leave(const Belongings& belongings);

  // With a step that was skipped and has not been counted.
  [[nodiscard]] AlgorithmState state();
  [[nodiscard]] const BucketLayout& layout() const { return layouts_.last(); }
  // Synchronised backwards so far, in this run and in those that it continues.
  [[nodiscard]] int64_t step() const { return step_; }
  // The guard goes on from this with the same verdicts, see Guard::state(); undefined where there is nothing.
  [[nodiscard]] at::Tensor guardTable() const;
  // A state that is refused changes nothing. The ranks compare the table of the guard in the step that follows.
  void load(const AlgorithmState& state, BucketLayout layout, int64_t step, const at::Tensor& guardTable = {});
  [[nodiscard]] bool keepsResiduals() const {
    const auto* const keeps = algorithm_->as<KeepsResiduals>();
    return keeps != nullptr && keeps->keepsAny();
  }
  [[nodiscard]] bool canReduceToParts() const { return algorithm_->as<ReducesToParts>() != nullptr; }
  // Multiplies the gradients that the algorithm remembers. Throws where it remembers none.
  void rescale(double factor);

  // Returns whether no program of this hook can touch a bucket any more: after a failure some may run on for a moment.
  [[nodiscard]] bool waitForPrograms(std::chrono::milliseconds limit) const { return ledger_->waitForPrograms(limit); }
  [[nodiscard]] HookStats stats() const;
  // Counts from zero again. What is under way counts when it is over.
  void resetStats() { ledger_->reset(); }
  // As Algorithm::whyUncoded(), of the ranks of this model.
  [[nodiscard]] std::string whyUncoded() const { return algorithm_->whyUncoded(*members_.topology()); }
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const Options& options() const { return options_; }

 private:
  [[nodiscard]] const std::string& algorithm() const override { return name_; }
  [[nodiscard]] const std::vector<at::Tensor>& parameters() const override { return parameters_; }
  [[nodiscard]] const std::vector<int64_t>& layers() const override { return layers_; }
  [[nodiscard]] const std::vector<at::Tensor>& buffers() const override { return buffers_; }
  [[nodiscard]] int rank() const override { return members_.group().identity().rank; }
  [[nodiscard]] int size() const override { return members_.group().identity().size; }
  [[nodiscard]] bool isSpeaker() const override { return rank() == 0 && isOfFirstShards(); }
  [[nodiscard]] bool isOfFirstShards() const { return !shards_ || shards_->identity().rank == 0; }
  [[nodiscard]] const HostTopology& topology() const override { return *members_.topology(); }
  void checkWeightsAreFree(const char* call) const override;
  c10::intrusive_ptr<c10d::Work> submit(const char* name, const std::vector<at::Tensor>& tensors, Wait wait,
                                        Task task) override;
  c10::intrusive_ptr<c10d::Work> submitInBackground(const char* name, const std::vector<at::Tensor>& tensors,
                                                    Task task) override;
  c10::intrusive_ptr<c10d::Work> submitAmongShards(const char* name, const std::vector<at::Tensor>& tensors,
                                                   Task task) override;
  void countRound() override { ledger_->countRound(); }
  void noteMemory(std::map<std::string, int64_t> bytes) override { ledger_->noteMemory(std::move(bytes)); }
  void noteChosen(std::map<std::string, int64_t> values) override { ledger_->noteChosen(std::move(values)); }

  c10::intrusive_ptr<c10::ivalue::Future> runBucket(c10d::GradBucket& gradients);
  // DDP raises the error at the end of the backward, whose step ends here.
  c10::intrusive_ptr<c10::ivalue::Future> failBackward(std::exception_ptr error);
  // The members agree, and the algorithm begins anew, if the group has others than before. Throws where it cannot.
  // Collective.
  void followMembers(at::Device device);
  // Throws where the algorithm has not begun again.
  void checkMembers() const;
  void abortHost(const char* reason);
  // Programs among the former members have failed by now, and may touch a gradient for a moment yet.
  void awaitFormerPrograms();
  // The algorithm anew, with what is known of the model.
  void takeAgain();
  // Puts an algorithm to work, which begins anew.
  void take(const std::string& name, const std::map<std::string, OptionValue>& values);
  [[nodiscard]] GradientScope scope() const;
  // Whether the algorithm is told of skipped steps, too.
  [[nodiscard]] bool countsSteps() const { return algorithm_->as<CountsSkippedSteps>() != nullptr; }
  // Where all ranks are at the same step when they make themselves equal: a rank that is at another one, and waits in a
  // round, finds out at once.
  [[nodiscard]] ExecutorProvider& meetingGroup() const { return countsSteps() ? *background_ : members_.group(); }
  void checkThatAllCan(const char* call) override;
  void checkThatAllCan(const char* call, const AgreementWords& words, Registration own);
  // Throws where a CUDA graph is captured on the device of `tensors`, unless it may repeat a step of the algorithm.
  void checkCapture(const std::vector<at::Tensor>& tensors) const;
  [[nodiscard]] bool areOnCpu() const { return parameters_.empty() || parameters_.front().device().is_cpu(); }
  // The step at hand was skipped, if its gradients have gone.
  void lookForSkippedStep();
  // The same where no forward or backward follows that would show it: also if they are not finite.
  void lookForSkippedStepAtEnd();
  // Tells the algorithm what follows of an event.
  void happen(StepEvent event);
  c10::intrusive_ptr<c10d::Work> submitTo(ExecutorProvider& group, const char* name,
                                          const std::vector<at::Tensor>& tensors, Wait wait, Task task,
                                          std::shared_ptr<const GradientList> gradients = nullptr);
  void makeEqual(ActsOnWeights& onWeights, const Belongings& belongings);
  // Throws where the algorithm does not run in the background. `call` is what the user called.
  [[nodiscard]] RunsInBackground& inBackground(const char* call) const;
  // Returns whether a bucket is the first and whether it is the last one of its step.
  std::pair<bool, bool> placeInStep(c10d::GradBucket& gradients) {
    // A later bucket ends that step, where DDP reduces fewer parameters than are registered.
    if (gradients.getIndex() > 0) staticLeft_ = 0;
    if (staticLeft_ == 0) return {gradients.getIndex() == 0, gradients.isLast()};
    const bool isFirst = staticLeft_ == parameters_.size();
    staticLeft_ -= std::min(staticLeft_, gradients.getParameters().size());
    return {isFirst, staticLeft_ == 0};
  }
  // Writes into the slots whether this rank has used them; whether that is known.
  bool findUse(const c10d::GradBucket& gradients, Slots& slots);
  c10::intrusive_ptr<c10d::Work> reduceSlots(const at::Tensor& flat, Slots slots, bool isFirst, bool isLast,
                                             bool tellsUse);
  // Before all else of a bucket. Returns what of it travels apart.
  std::vector<Slots> beginBucket(const at::Tensor& flat, const Slots& slots, bool isFirst);
  c10::intrusive_ptr<c10d::Work> submitBucket(const char* name, const std::vector<at::Tensor>& tensors,
                                              BucketProgram program);
  // Ranks that hold gradients of different parameters have agreed on the step before.
  void awaitAgreement();
  void queueAfterBackward();

  const std::string name_;
  const Options options_;
  HookMembers members_;
  std::shared_ptr<ExecutorProvider> background_;
  // This executor runs what is in the background.
  std::shared_ptr<Executor> backgroundExecutor_;
  std::shared_ptr<ExecutorProvider> host_;
  std::shared_ptr<ExecutorProvider> shards_;
  const std::vector<at::Tensor> parameters_;
  std::vector<int64_t> layers_;
  std::vector<at::Tensor> buffers_;
  // Whether it goes by forwards and by what the optimizer does.
  bool actsOnWeights_;
  bool hasBegun_ = false;
  bool hasLeft_ = false;
  // Why nothing of the step at hand travels: the members do not agree.
  std::exception_ptr refusal_;
  // A bucket of the backward at hand could not be exchanged.
  bool hasBackwardFailed_ = false;
  // The parameters that DDP has yet to hand over in the first step of a static graph: at the end of backward, in
  // buckets of which, if there are several, each is the first one and none the last.
  size_t staticLeft_;
  // Since the last synchronised backward.
  OutstandingForwards forwards_;
  StepTracker tracker_;
  GradientsLeft gradients_;
  const std::shared_ptr<HookLedger> ledger_ = std::make_shared<HookLedger>();
  BucketLayouts layouts_;
  std::optional<ParameterUse> use_;
  std::vector<ParameterFacts> facts_;
  // See useOptimizer(); nothing where the optimizer is not known.
  std::optional<bool> isOptimizerLinear_;
  // The step at hand reduces something to parts, so the ranks agree on it in this program.
  bool hasParts_ = false;
  c10::intrusive_ptr<c10d::Work> agreement_;
  int64_t step_ = 0;
  // The algorithm has not begun again among other members, or lacks groups of them.
  bool hasToBegin_ = false;
  // The furthest member was at this step when they last met.
  int64_t furthestStep_ = 0;
  // The guard's table has this hash, 0 where it holds nothing, and was loaded before this step.
  uint32_t loadedGuardHash_ = 0;
  int64_t loadedStep_ = 0;
  // Guards the pointer, which leave() replaces, for those who call from another thread than the one that trains.
  mutable std::mutex mutex_;
  std::shared_ptr<Algorithm> algorithm_;
  ReduceTraits traits_;
  // As the ranks compare it in every program.
  std::shared_ptr<const std::string> configuration_;
};

}  // namespace bagua
