// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "algorithms/algorithm.h"
#include "algorithms/bucket_layout.h"
#include "backend/executor.h"

namespace bagua {

struct HookStats {
  // Synchronised backwards, and buckets in them.
  int64_t steps = 0;
  int64_t buckets = 0;
  // Times that the ranks communicated for the sake of a step.
  int64_t rounds = 0;
  // Bytes of gradients or weights that this rank had to communicate.
  int64_t logicalBytes = 0;
  // What this rank sent to other ranks for them.
  Traffic traffic;
  StageSeconds seconds;
};

// An algorithm at work on one model: turns each bucket that DDP hands over into a program, tells the algorithm how far
// a step has come, and counts what it costs. Shared by the Reducer's hook and the handle that the user holds. run() and
// stats() may be called from any thread, the others from the one that trains.
class HookRunner final : public std::enable_shared_from_this<HookRunner>, private StepContext {
 public:
  // Without `parameters` it serves algorithms that only know gradients. `isStaticGraph`: of the DDP model.
  HookRunner(const std::string& algorithm, const std::map<std::string, OptionValue>& options,
             std::shared_ptr<ExecutorProvider> group, std::vector<at::Tensor> parameters, bool isStaticGraph = false);
  // For algorithms that declare runsInBackground, before the first step. Collective.
  void useBackground(std::shared_ptr<ExecutorProvider> group);

  // Called by DDP for every bucket of every step, on an autograd thread. The future holds the tensor that DDP copies
  // the gradients from: the bucket's own buffer.
  c10::intrusive_ptr<c10::ivalue::Future> run(c10d::GradBucket& gradients);

  // The same for gradients of another source than DDP: `isFirst` and `isLast` of a step. No work where the gradients
  // stay as they are. The end of backward has then to be told through afterBackward().
  c10::intrusive_ptr<c10d::Work> reduceBucket(const at::Tensor& flat, const std::vector<BucketEntry>& entries,
                                              bool isFirst, bool isLast);
  void afterBackward();

  void useTopology(const HostTopology& topology);
  // Whether gradients travel between hosts, where they had better leave early and in small buckets.
  [[nodiscard]] bool wantsSmallBuckets() const { return spansHosts_ && algorithm_->reducesGradients(); }
  void beforeForward(std::vector<Momentum> momenta);
  void afterStep();
  bool abort();
  bool resume();
  // From the next bucket on the gradients are averaged in full precision, as by DDP without a hook. Collective.
  void leave();

  [[nodiscard]] AlgorithmState state() const { return algorithm_->state(); }
  [[nodiscard]] const BucketLayout& layout() const { return layouts_.last(); }
  void load(const AlgorithmState& state, BucketLayout layout);

  [[nodiscard]] HookStats stats() const;
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const Options& options() const { return options_; }

 private:
  // Programs in flight hold this, and not the runner: it owns the executor that they run on.
  struct Ledger {
    std::mutex mutex;
    HookStats stats;
  };

  [[nodiscard]] const std::string& algorithm() const override { return name_; }
  [[nodiscard]] const std::vector<at::Tensor>& parameters() const override { return parameters_; }
  [[nodiscard]] int rank() const override { return group_->identity().rank; }
  [[nodiscard]] int size() const override { return group_->identity().size; }
  c10::intrusive_ptr<c10d::Work> submit(const char* name, const std::vector<at::Tensor>& tensors, Wait wait,
                                        Task task) override;
  c10::intrusive_ptr<c10d::Work> submitInBackground(const char* name, const std::vector<at::Tensor>& tensors,
                                                    Task task) override;
  void countRound() override;

  c10::intrusive_ptr<c10d::Work> submitTo(ExecutorProvider& group, const char* name,
                                          const std::vector<at::Tensor>& tensors, Wait wait, Task task);
  // Reduces what DDP handed over; `parts` as BucketLayouts::partsOf makes them.
  static void reduce(Algorithm& algorithm, at::Tensor& gradients, const std::vector<BucketEntry>& whole,
                     const std::vector<std::vector<BucketEntry>>& parts, Communicator& communicator,
                     StageSeconds& seconds);
  void queueAfterBackward();

  const std::string name_;
  const Options options_;
  const std::shared_ptr<ExecutorProvider> group_;
  std::shared_ptr<ExecutorProvider> background_;
  const std::vector<at::Tensor> parameters_;
  const bool actsOnWeights_;
  // In the first step of a static graph DDP hands over all buckets, none of them as the last, at the end of backward.
  bool isFirstStatic_;
  // Whether the coming backward is one of a forward that the algorithm has seen.
  bool isAnnounced_ = false;
  bool spansHosts_ = false;
  const std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();
  BucketLayouts layouts_;
  std::shared_ptr<Algorithm> algorithm_;
  // As the ranks compare it in every program.
  const std::shared_ptr<const std::string> configuration_;
};

}  // namespace bagua
