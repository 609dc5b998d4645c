// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/rounds/rounds.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <utility>

#include "algorithms/shared/cache_blocks.h"
#include "algorithms/shared/compressed/coding_look.h"
#include "algorithms/shared/compressed/collectives.h"
#include "algorithms/shared/compressed/mean.h"

namespace bagua::rounds {
namespace {

// Of all that is drawn at random.
constexpr uint64_t kSeed = 0;
// Of tensors of several dtypes in one memory.
constexpr int64_t kAlignment = 64;

// Equal for equal bits; on two ranks, whatever their devices.
at::Tensor digestOf(const std::vector<at::Tensor>& flats) {
  constexpr int64_t kOdd = 0x1E3779B97F4A7C15;
  at::Tensor digest = at::zeros({2}, flats.front().options().dtype(at::kLong));
  for (const auto& flat : flats) {
    digest[1].mul_(31);
    // Sums of whole numbers, which wrap: the same in any order, and for any cut into blocks.
    inBlocks(flat.numel(), flat.device(), [&](int64_t begin, int64_t length) {
      const auto word = flat.scalar_type() == at::kDouble ? at::kLong : at::kInt;
      const at::Tensor bits = flat.narrow(0, begin, length).view(word).to(at::kLong);
      const at::Tensor places = at::arange(begin, begin + length, bits.options()).mul_(kOdd).add_(1);
      digest[0].add_(bits.sum());
      digest[1].add_(places.mul_(bits).sum());
    });
  }
  return digest;
}

// The caller waits for the answer: what the ranks do next depends on it.
bool areSameOnAllRanks(const std::vector<at::Tensor>& flats, StepContext& context) {
  at::Tensor least = digestOf(flats);
  at::Tensor most = least.clone();
  context
      .submitInBackground("bagua:compare_weights", {least, most},
                          [least, most](Communicator& communicator, StageSeconds& seconds) mutable {
                            const Stage stage(seconds, stages::kCompareWeights);
                            communicator.allReduce(least, c10d::ReduceOp::MIN);
                            communicator.allReduce(most, c10d::ReduceOp::MAX);
                          })
      ->wait(kNoTimeout);
  return least.equal(most);
}

// The bytes of `numel` elements, in whole units.
int64_t bytesOf(int64_t numel, at::ScalarType dtype, int64_t unit) {
  const int64_t bytes = numel * static_cast<int64_t>(elementSize(dtype));
  return (bytes + unit - 1) / unit * unit;
}

int64_t bytesOf(const at::Tensor& tensor) { return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0; }

}  // namespace

Rounds::Rounds(const Settings& settings)
    : settings_(settings), guard_(std::make_shared<Guard>(settings_.guard, Guard::Messages::kDifferences)) {
  TORCH_CHECK_VALUE(settings_.mixing >= 0 && settings_.mixing <= 1, "bagua: mixing must be from 0 to 1, got ",
                    settings_.mixing);
  if (settings_.outer) check(*settings_.outer);
  const ScheduleOptions& schedule = settings_.schedule;
  check(schedule);
  if (schedule.isWhole()) schedule_.emplace(*schedule.every, *schedule.fragments, *schedule.delay);
}

// --- The model -------------------------------------------------------------------------------------------------------

std::vector<std::vector<int64_t>> Rounds::cut(const StepContext& context) const {
  std::vector<int64_t> lengths;
  for (const auto& parameter : context.parameters()) lengths.push_back(parameter.numel());
  // A layer's number is that of its neighbours in the model.
  const auto& layers = context.layers();
  int64_t pieces = layers.empty() ? static_cast<int64_t>(lengths.size()) : 1;
  for (size_t i = 1; i < layers.size(); ++i) pieces += layers[i] != layers[i - 1] ? 1 : 0;
  return cutIntoFragments(lengths, layers, chooseFragments(settings_.schedule, pieces), settings_.pattern);
}

void Rounds::useModel(const StepContext& context) {
  static_cast<void>(cut(context));
  topology_ = settings_.hierarchical ? context.topology() : HostTopology::oneRankPerHost(context.size());
  scope_ = topology_->maxRanksPerHost() > 1 ? GradientScope::kHost : GradientScope::kNone;
}

std::string Rounds::whyUncoded(const HostTopology& topology) const {
  if (!settings_.codec) return {};
  return compressed::whyUncoded({.hierarchical = settings_.hierarchical}, topology);
}

void Rounds::makeFragments(const StepContext& context) {
  for (const auto& positions : cut(context)) {
    Fragment& fragment = fragments_.emplace_back();
    // In the order of their first parameters: the same on all ranks.
    std::vector<std::pair<at::ScalarType, std::vector<int64_t>>> groups;
    for (const int64_t position : positions) {
      const auto own = context.parameters()[position].scalar_type();
      const auto dtype = settings_.outer ? computeTypeOf(own) : own;
      auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& it) { return it.first == dtype; });
      if (group == groups.end()) group = groups.insert(groups.end(), {dtype, {}});
      group->second.push_back(position);
    }
    for (const auto& [dtype, group] : groups) {
      std::vector<at::Tensor> parameters;
      for (const int64_t position : group) parameters.push_back(context.parameters()[position]);
      fragment.buckets.push_back(
          std::make_shared<FragmentBucket>(FragmentBucket{WeightBucket(std::move(parameters), group), dtype, {}}));
    }
  }
  if (!settings_.averageBuffers) return;
  std::vector<at::Tensor> buffers;
  for (const auto& buffer : context.buffers()) {
    if (buffer.is_floating_point()) buffers.push_back(buffer);
  }
  buffers_ = weightBuckets(buffers);
}

Rounds::FragmentBuckets Rounds::allBuckets() const {
  FragmentBuckets all;
  for (const auto& fragment : fragments_) all.insert(all.end(), fragment.buckets.begin(), fragment.buckets.end());
  return all;
}

bool Rounds::isCoded() const { return settings_.codec && topology_->hostCount() > 1; }

int64_t Rounds::ownedOf(const FragmentBucket& bucket, int rank) const {
  return compressed::ownLength(HostLanes(*topology_, rank, bucket.weights.numel()), rank);
}

void Rounds::allocate(FragmentBucket& bucket, int rank) const {
  const at::Tensor& weights = bucket.outer.weights;
  if (settings_.outer->momentum != 0 && !bucket.outer.momentum.defined())
    bucket.outer.momentum = at::empty_like(weights);
  if (isCoded() && settings_.errorFeedback && !bucket.residual.defined()) {
    const auto options = weights.options().dtype(at::kFloat);
    bucket.residual = at::zeros({bucket.weights.numel()}, options);
    bucket.ownerResidual = at::zeros({ownedOf(bucket, rank)}, options);
  }
}

// --- Rounds ----------------------------------------------------------------------------------------------------------

void Rounds::reduce(Bucket& bucket, Communicator& communicator) {
  const Stage stage(bucket.seconds, stages::kAllReduce);
  communicator.allReduce(bucket.flat, c10d::ReduceOp::AVG);
}

void Rounds::prepare(StepContext& context) {
  if (fragments_.empty()) {
    makeFragments(context);
    if (!settings_.outer) noteMemory(context);
  }
  if (settings_.outer && !hasStarted_) startOuterWeights(context);
}

// They are the weights before the first step. Ranks may have loaded checkpoints of their own: unless all have the same
// bits, they take rank 0's.
void Rounds::startOuterWeights(StepContext& context) {
  std::vector<at::Tensor> flats;
  for (const auto& bucket : allBuckets()) {
    bucket->outer = {.weights = bucket->weights.packAs(bucket->dtype)};
    flats.push_back(bucket->outer.weights);
  }
  if (!areSameOnAllRanks(flats, context)) {
    context
        .submitInBackground("bagua:start_rounds", flats,
                            [flats](Communicator& communicator, StageSeconds& seconds) mutable {
                              const Stage stage(seconds, stages::kStartRounds);
                              for (auto& flat : flats) communicator.broadcast(flat, 0);
                            })
        ->wait(kNoTimeout);
  }
  for (const auto& bucket : allBuckets()) allocate(*bucket, context.rank());
  hasStarted_ = true;
  noteMemory(context);
}

void Rounds::noteMemory(StepContext& context) {
  std::map<std::string, int64_t> bytes;
  for (const auto& bucket : allBuckets()) {
    bytes["outer_weights"] += bytesOf(bucket->outer.weights);
    bytes["outer_momentum"] += bytesOf(bucket->outer.momentum);
    bytes["residuals"] += bytesOf(bucket->residual) + bytesOf(bucket->ownerResidual);
  }
  // Of the fragment on its way: its differences, or its weights where there is no outer optimizer.
  bytes["largest_fragment"] = longestFragment(1);
  context.noteMemory(std::move(bytes));
  countState();
}

void Rounds::countState() {
  int64_t bytes = bytesOf(room_);
  for (const auto& bucket : allBuckets()) {
    bytes += bytesOf(bucket->outer.weights) + bytesOf(bucket->outer.momentum);
    bytes += bytesOf(bucket->residual) + bytesOf(bucket->ownerResidual);
  }
  stateBytes_ = bytes;
}

int64_t Rounds::longestFragment(int64_t unit) const {
  int64_t longest = 0;
  for (const auto& fragment : fragments_) {
    int64_t bytes = 0;
    for (const auto& bucket : fragment.buckets) bytes += bytesOf(bucket->weights.numel(), bucket->dtype, unit);
    longest = std::max(longest, bytes);
  }
  return longest;
}

std::vector<at::Tensor> Rounds::roomFor(const Fragment& fragment) {
  if (!room_.defined()) {
    const auto options = fragment.buckets.front()->outer.weights.options().dtype(at::kByte);
    room_ = at::empty({longestFragment(kAlignment)}, options);
    countState();
  }
  std::vector<at::Tensor> rooms;
  int64_t begin = 0;
  for (const auto& bucket : fragment.buckets) {
    const int64_t bytes = bytesOf(bucket->weights.numel(), bucket->dtype, 1);
    rooms.push_back(room_.narrow(0, begin, bytes).view(bucket->dtype));
    begin += bytesOf(bucket->weights.numel(), bucket->dtype, kAlignment);
  }
  return rooms;
}

void Rounds::beforeForward(StepContext& context) {
  prepare(context);
  // An error in the background comes out at the next step, not only when the delay is over.
  for (const auto& fragment : fragments_) {
    if (fragment.exchange && fragment.exchange->work && fragment.exchange->work->isCompleted()) {
      fragment.exchange->work->wait(kNoTimeout);
    }
  }
}

void Rounds::beginStep(StepContext& context) {
  if (std::exchange(isInStep_, true)) return;
  prepare(context);
  ++step_;
  if (isPaused_) return;
  if (!schedule_) return chooseInStep(context);
  if (const auto number = schedule_->takenAfter(step_)) take(*number, context);
}

void Rounds::afterStep(StepContext& context) {
  beginStep(context);
  isInStep_ = false;
  if (!schedule_) return;
  if (const auto number = schedule_->synchronisedAfter(step_); number && fragments_[*number].exchange) {
    synchronise(*number, context);
  }
}

void Rounds::take(int64_t number, StepContext& context) {
  Fragment& fragment = fragments_[number];
  TORCH_INTERNAL_ASSERT(!fragment.exchange);
  Exchange& exchange = fragment.exchange.emplace();
  std::vector<at::Tensor> flats;
  if (settings_.outer) {
    flats = roomFor(fragment);
    for (size_t i = 0; i < flats.size(); ++i) {
      fragment.buckets[i]->weights.subtractFrom(fragment.buckets[i]->outer.weights, flats[i]);
    }
  } else {
    for (const auto& bucket : fragment.buckets) flats.push_back(bucket->weights.pack());
    exchange.means = flats;
  }
  if (number + 1 == static_cast<int64_t>(fragments_.size())) exchange.buffers = packAll(buffers_);
  std::vector<at::Tensor> tensors = flats;
  tensors.insert(tensors.end(), exchange.buffers.begin(), exchange.buffers.end());
  const auto* const codec = isCoded() ? settings_.codec : nullptr;
  if (codec != nullptr) guard_->begin({.flat = flats.front(), .step = step_}, context.isSpeaker() ? 0 : 1);
  auto program = [buckets = fragment.buckets, flats, buffers = exchange.buffers, outer = settings_.outer, codec,
                  hierarchical = settings_.hierarchical, errorFeedback = settings_.errorFeedback, guard = guard_,
                  sharesHost = topology_->maxRanksPerHost() > 1,
                  step = step_](Communicator& communicator, StageSeconds& seconds) mutable {
    for (size_t i = 0; i < buckets.size(); ++i) {
      FragmentBucket& bucket = *buckets[i];
      if (codec != nullptr) {
        const uint64_t key = bucketKey(kSeed, step, bucket.weights.firstPosition());
        const auto rounding =
            !errorFeedback && codec->codec->canRoundStochastically() ? Rounding::kStochastic : Rounding::kNearest;
        const compressed::Coding coding{.codec = codec->codec,
                                        .sender = {rounding, key, bucket.residual, bucket.residual},
                                        .owner = {rounding, ~key, bucket.ownerResidual, bucket.ownerResidual}};
        if (guard->isOn()) {
          const Stage stage(seconds, stages::kGuard);
          Encoding seen = coding.sender;
          // That is of the lanes of this rank alone, whose elements the host adds up.
          if (sharesHost) seen.residual.reset();
          compressed::CodingLook(flats[i], 0, bucket.weights.entriesOf(flats[i]), codec->name, seen).tell(*guard, step);
        }
        compressed::reduceToMean(flats[i], {.hierarchical = hierarchical}, coding, seconds, communicator);
      } else {
        const Stage stage(seconds, stages::kAverageFragment);
        communicator.allReduce(flats[i], c10d::ReduceOp::AVG);
      }
      if (!outer) continue;
      const Stage stage(seconds, stages::kOuterStep);
      rounds::step(bucket.outer, flats[i], *outer);
    }
    const Stage stage(seconds, stages::kAverageBuffers);
    for (auto& buffer : buffers) communicator.allReduce(buffer, c10d::ReduceOp::AVG);
  };
  exchange.work = context.submitInBackground("bagua:average_fragment", tensors, std::move(program));
}

void Rounds::synchronise(int64_t number, StepContext& context) {
  Fragment& fragment = fragments_[number];
  const Exchange exchange = *std::exchange(fragment.exchange, std::nullopt);
  if (exchange.work) {
    RECORD_USER_SCOPE("bagua:wait_for_fragment");
    exchange.work->wait(kNoTimeout);
  }
  for (size_t i = 0; i < fragment.buckets.size(); ++i) {
    const FragmentBucket& bucket = *fragment.buckets[i];
    if (settings_.outer) {
      bucket.weights.mixWith(bucket.outer.weights, settings_.mixing);
    } else {
      bucket.weights.unpack(exchange.means[i]);
    }
  }
  if (!exchange.buffers.empty()) unpackAll(buffers_, exchange.buffers);
  fragment.synchronisedAfter = step_;
  context.countRound();
}

void Rounds::synchronize(StepContext& context) {
  prepare(context);
  const auto fragments = static_cast<int64_t>(fragments_.size());
  for (int64_t number = 0; number < fragments; ++number) {
    if (fragments_[number].exchange) synchronise(number, context);
  }
  for (int64_t number = 0; number < fragments; ++number) {
    if (fragments_[number].synchronisedAfter == step_) continue;
    take(number, context);
    synchronise(number, context);
  }
  if (!settings_.outer || settings_.mixing == 0) return;
  for (const auto& bucket : allBuckets()) bucket->weights.unpack(bucket->outer.weights);
}

bool Rounds::abort(StepContext& context) {
  if (isPaused_) return false;
  context.checkThatAllCan("abort()");
  synchronize(context);
  return !std::exchange(isPaused_, true);
}

bool Rounds::resume(StepContext& /*context*/) { return std::exchange(isPaused_, false); }

}  // namespace bagua::rounds
