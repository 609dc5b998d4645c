// SPDX-License-Identifier: Apache-2.0
#include <c10/util/Exception.h>

#include <atomic>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "algorithms/algorithm_interfaces.h"
#include "algorithms/registry.h"
#include "algorithms/shared/compressed/coding_look.h"
#include "algorithms/shared/compressed/mean.h"
#include "algorithms/shared/weight_exchanges/ring_exchange.h"
#include "algorithms/shared/weights.h"
#include "backend/config.h"

namespace bagua {
namespace {

// Draws the weights of neighbours in a ring together after every step, by differences of 8 bits against replicas that
// both ends hold.
class LowPrecisionDecentralized final : public Algorithm, public ActsOnWeights, public KeepsState, public IsGuarded {
 public:
  LowPrecisionDecentralized(bool hierarchical, int64_t interval, const std::string& codec, Guard::Mode guard)
      : hierarchical_(hierarchical),
        interval_(interval),
        codec_(CodecRegistry::find(codec)),
        guard_(std::make_shared<Guard>(guard, Guard::Messages::kDifferences)) {
    TORCH_CHECK_VALUE(interval >= 1, "bagua: communication_interval must be at least 1, got ", interval);
  }

  void useModel(const StepContext& context) override {
    topology_ = hierarchical_ ? context.topology() : HostTopology::oneRankPerHost(context.size());
  }

  void reduce(Bucket& /*bucket*/, Communicator& /*communicator*/) override {
    TORCH_INTERNAL_ASSERT(false, "low_precision_decentralized leaves gradients alone");
  }

  [[nodiscard]] int64_t commonStep() const override { return step_; }

  [[nodiscard]] std::string whyUncoded(const HostTopology& topology) const override {
    return compressed::whyUncoded({.hierarchical = hierarchical_}, topology);
  }

  [[nodiscard]] Guard& guard() override { return *guard_; }

  void beforeForward(StepContext& context) override { prepare(context); }

  void afterStep(StepContext& context) override {
    prepare(context);
    if (step_++ % interval_ != 0 || context.size() == 1) return;
    // One bucket is copied while others travel.
    std::vector<at::Tensor> weights;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (size_t i = 0; i < buckets_.size(); ++i) {
      weights.push_back(buckets_[i].pack());
      works.push_back(submitStep(weights[i], i, context));
    }
    for (size_t i = 0; i < buckets_.size(); ++i) {
      works[i]->wait(kNoTimeout);
      buckets_[i].unpack(weights[i]);
    }
    context.countRound();
  }

  void synchronize(StepContext& context) override {
    averageWeights(context);
    // They start again from these weights.
    keep({});
  }

  [[nodiscard]] int64_t stateBytes() const override { return stateBytes_; }

  // Replicas start from the weights that the new neighbours have.
  [[nodiscard]] AlgorithmState shared() const override { return {{"step", counterTensor(step_)}}; }
  [[nodiscard]] AlgorithmState state() const override {
    AlgorithmState state = shared();
    for (size_t i = 0; i < replicas_.size(); ++i) {
      for (const auto& [name, member] : kReplicas)
        state.emplace(name + std::to_string(i), (replicas_[i].*member).clone());
    }
    return state;
  }

  void load(const AlgorithmState& state, StepContext& context) override {
    const auto buckets = bucketsOf(context);
    std::set<std::string> names = {"step"};
    for (size_t i = 0; i < buckets.size(); ++i) {
      for (const auto& [name, member] : kReplicas) names.insert(name + std::to_string(i));
    }
    checkThatAllAreTaken(state, [&](const std::string& name) { return names.contains(name); });
    const int64_t step = counterOf(state, "step");
    std::vector<RingReplicas> replicas;
    for (size_t i = 0; state.size() > 1 && i < buckets.size(); ++i) {
      const RingExchange ring(*topology_, context.rank(), buckets[i].numel());
      const at::Tensor like = buckets[i].pack().narrow(0, 0, ring.ownLength(context.rank()));
      RingReplicas& replica = replicas.emplace_back();
      for (const auto& [name, member] : kReplicas) replica.*member = tensorOf(state, name + std::to_string(i), like);
      if (ring.hasOneNeighbour()) replica.right = replica.left;
    }
    // None in a checkpoint from before the first step: they start then.
    keep(std::move(replicas));
    step_ = step;
  }

 private:
  using ReplicaMember = at::Tensor RingReplicas::*;
  inline static const std::vector<std::pair<std::string, ReplicaMember>> kReplicas = {
      {"replica.self.", &RingReplicas::self},
      {"replica.left.", &RingReplicas::left},
      {"replica.right.", &RingReplicas::right}};

  void keep(std::vector<RingReplicas> replicas) {
    replicas_ = std::move(replicas);
    int64_t bytes = 0;
    for (const auto& replica : replicas_) {
      for (const auto& [name, member] : kReplicas) {
        const bool isShared = member == &RingReplicas::right && replica.right.is_same(replica.left);
        if (!isShared) bytes += static_cast<int64_t>((replica.*member).nbytes());
      }
    }
    stateBytes_ = bytes;
  }

  // Between several hosts, or ranks: on a single host there is nothing to compress.
  [[nodiscard]] bool isRing() const { return topology_->hostCount() > 1; }

  static std::vector<WeightBucket> bucketsOf(const StepContext& context) {
    return weightBuckets(context.parameters(), config::defaultBucketBytes());
  }

  // The replicas start from the weights before the first step, which the neighbours tell in full precision: ranks may
  // have loaded checkpoints of their own.
  void prepare(StepContext& context) {
    if (buckets_.empty()) buckets_ = bucketsOf(context);
    if (!isRing() || !replicas_.empty()) return;
    // Shared: a program that is abandoned may outlive us.
    const auto replicas = std::make_shared<std::vector<RingReplicas>>(buckets_.size());
    std::vector<at::Tensor> weights = packAll(buckets_);
    context
        .submit("bagua:start_replicas", weights, StepContext::Wait::kNow,
                [replicas, weights, topology = *topology_](Communicator& communicator, StageSeconds& seconds) mutable {
                  for (size_t i = 0; i < weights.size(); ++i) {
                    const RingExchange ring(topology, communicator.rank(), weights[i].numel());
                    replicas->at(i) = ring.start(weights[i], seconds, communicator);
                  }
                })
        ->wait(kNoTimeout);
    keep(std::move(*replicas));
  }

  c10::intrusive_ptr<c10d::Work> submitStep(const at::Tensor& weights, size_t bucket, StepContext& context) {
    if (!isRing()) {
      return context.submit("bagua:average_weights", {weights}, StepContext::Wait::kNowInAnyOrder,
                            [flat = weights](Communicator& communicator, StageSeconds& seconds) mutable {
                              const Stage stage(seconds, stages::kAllReduce);
                              communicator.allReduce(flat, c10d::ReduceOp::AVG);
                            });
    }
    return context.submit(
        "bagua:exchange_differences", {weights}, StepContext::Wait::kNowInAnyOrder,
        [flat = weights, replicas = replicas_[bucket], topology = *topology_,
         coding = compressed::codingOf(codec_.codec, keyOf(bucket)),
         look = lookAt(weights, bucket, context.rank())](Communicator& communicator, StageSeconds& seconds) mutable {
          const RingExchange ring(topology, communicator.rank(), flat.numel(), coding);
          ring.step(flat, replicas, seconds, communicator, look);
        });
  }

  // Returns the guard's look, if it wants one. The ranks of the first host speak, each of the lanes that it owns.
  [[nodiscard]] RingExchange::Look lookAt(const at::Tensor& weights, size_t bucket, int rank) const {
    const int64_t step = step_ - 1;
    Bucket seen{.flat = weights, .step = step, .firstParameter = buckets_[bucket].firstPosition()};
    guard_->begin(seen, topology_->hostOf(rank));
    // The looks of a pair are at one exchange and the next.
    seen.step /= interval_;
    const auto key = guard_->keyOfLook(seen, 0);
    if (!key) return {};
    return [guard = guard_, entries = buckets_[bucket].entriesOf(weights), step, key = *key, codec = codec_.name](
               const at::Tensor& difference, int64_t begin) {
      compressed::CodingLook(difference, begin, entries, codec, {.key = key}).tell(*guard, step);
    };
  }

  // Of the step at hand.
  [[nodiscard]] uint64_t keyOf(size_t bucket) const {
    return static_cast<uint64_t>(step_) << 32U ^ static_cast<uint64_t>(bucket);
  }

  const bool hierarchical_;
  const int64_t interval_;
  const CodecInfo& codec_;
  // A program that is abandoned may outlive us.
  const std::shared_ptr<Guard> guard_;
  // The participants as hosts.
  std::optional<HostTopology> topology_;
  std::vector<WeightBucket> buckets_;
  std::vector<RingReplicas> replicas_;
  // Of these, for any thread that asks.
  std::atomic<int64_t> stateBytes_ = 0;
  // Steps of the optimizer so far.
  int64_t step_ = 0;
};

}  // namespace

BAGUA_REGISTER_ALGORITHM({
    .name = "low_precision_decentralized",
    .summary = "Weights of neighbours in a ring drawn together by 8-bit differences after every step.",
    .position = 4,
    .agreement = Agreement::kEventual,
    .optimizer = "Optimizer",
    .options = {{"hierarchical", true,
                 "A ring of hosts, after an average inside each (on a single host: that average alone); False: a ring "
                 "of ranks."},
                {"communication_interval", int64_t{1}, "Exchange after every n-th step."},
                {"codec", std::string(compressed::kDefaultCodec),
                 "Of the differences: one of bagua.available_codecs()."},
                Guard::option(Guard::Messages::kDifferences)},
    .create =
        [](const Options& options) {
          return std::make_unique<LowPrecisionDecentralized>(
              options.get<bool>("hierarchical"), options.get<int64_t>("communication_interval"),
              options.get<std::string>("codec"), Guard::modeOf(options, Guard::Messages::kDifferences));
        },
})

}  // namespace bagua
