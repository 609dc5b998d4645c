// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "algorithms/bucket.h"
#include "algorithms/shared/compressed/coding.h"
#include "algorithms/shared/compressed/mean.h"
#include "algorithms/shared/compressed/small_residuals.h"
#include "algorithms/shared/compressed/step_sets.h"
#include "algorithms/shared/parameter_state.h"

namespace bagua::compressed {

// The residuals of error feedback: what a rank has not sent of its gradients, and what the owner of a chunk has not
// sent of the mean.
//
// A step reads one set and writes the other, see StepSets.
//
// Small residuals (LoCo's) are kept in 8 bits and follow what a step leaves behind as a moving average:
// e <- (1 - kGain) e + kGain (h - Q(h)), which is e + kGain (g - Q(h)): what is still owed is e / kGain.
class Feedback {
 public:
  static constexpr float kGain = 0.2F;

  explicit Feedback(bool isSmall = false) : isSmall_(isSmall) {}

  // Before all else of a bucket.
  void beginBucket(int64_t step) { steps_.begin(step); }

  // Lets `coding` read and write the residuals of a bucket whose values travel with `codec`.
  void useFor(const Bucket& bucket, const std::string& codec, const MeanOptions& options,
              const Communicator& communicator, Coding& coding);

  // After the values have travelled: keeps what `coding` has left of them.
  void keep(const Bucket& bucket, const std::string& codec, const MeanOptions& options,
            const Communicator& communicator, const Coding& coding);

  // In the place of both, where nothing travels: the next step goes on from the same residuals.
  void passOver(const Bucket& bucket, const std::string& codec, const MeanOptions& options,
                const Communicator& communicator);

  // Between the two: of entries that no rank has used nothing has been sent. `areUsed`: a number for each entry of the
  // bucket, which is zero there.
  void keepUnused(const Bucket& bucket, const at::Tensor& areUsed, const MeanOptions& options,
                  const Communicator& communicator, const Coding& coding) const;

  // `result`: all that a bucket's parameters get. `isFinite`: whether it is, if somebody has seen.
  void endBucket(const at::Tensor& result, std::optional<bool> isFinite = {}) {
    isFinite ? steps_.noteWhetherFinite(*isFinite) : steps_.noteResult(result);
  }

  // After the last bucket of a step whose results are not the same on all ranks. Collective.
  void agreeOnStep(at::Device device, Communicator& communicator) { steps_.agree(device, communicator); }

  // Drops what is held of parameters of a bucket, before all else. What a device may still read goes to `retained`.
  void forget(const std::vector<int64_t>& parameters, Bucket::Retained& retained);

  // Multiplies all residuals. Between two steps.
  void rescale(double factor);

  [[nodiscard]] int64_t bytes() const;
  [[nodiscard]] AlgorithmState state() const;
  void load(const AlgorithmState& state, const std::vector<at::Tensor>& parameters);

 private:
  // Of the values that a codec takes.
  template <typename State>
  struct Sets {
    explicit Sets(const std::string& codec)
        : sender{State("sender." + codec), State("sender." + codec)},
          owner{State("owner." + codec), State("owner." + codec)} {}

    State sender[2];
    State owner[2];
  };
  template <typename State>
  using SetsByCodec = std::map<std::string, std::unique_ptr<Sets<State>>>;

  template <typename State>
  Sets<State>& setsOf(SetsByCodec<State>& sets, const std::string& codec);
  // Calls visit(sets by codec), of the kind that is at work.
  template <typename Visit>
  auto withSets(Visit&& visit) const {
    return isSmall_ ? visit(small_) : visit(whole_);
  }
  void useWhole(Sets<ParameterState>& sets, const Bucket& bucket, const std::vector<Piece>& pieces,
                double orphansFactor, Coding& coding);
  void useSmall(Sets<SmallResiduals>& sets, const Bucket& bucket, const std::vector<Piece>& pieces,
                double orphansFactor, Coding& coding);

  mutable std::mutex mutex_;
  const bool isSmall_;
  SetsByCodec<ParameterState> whole_;
  SetsByCodec<SmallResiduals> small_;
  StepSets steps_;
};

}  // namespace bagua::compressed
