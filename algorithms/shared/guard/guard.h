// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "algorithms/bucket.h"
#include "algorithms/options.h"
#include "algorithms/shared/guard/guard_numbers.h"

namespace bagua {

// Watches what coding does to gradients. It warns where that is worse than the codec promises, and with "adapt" it has
// the parameter coded finer, level by level.
//
// An algorithm looks at a sample of some buckets, those that keyOfLook() names, which are the same on all ranks. It
// lets the numbers that it finds travel with the gradients, and hands over their means. So all ranks come to the same
// verdicts at the same steps without an exchange of their own. A verdict is given at the begin of the next step.
//
// Each rank looks at its own differences of weights, and no number travels: its verdicts are its own, so
// that it can only warn.
class Guard {
 public:
  // What messages consist of.
  enum class Messages { kGradients, kDifferences };
  enum class Measure {
    // What coding loses of a message, as a part of its squared norm without outliers.
    kCoding,
    // How far the mean that the ranks got is from the true one, as a part of its squared norm.
    kMean,
    // The squared norm of what error feedback holds back, in those of the gradient.
    kResidual,
  };
  static constexpr int kMeasures = 3;

  struct Reading {
    int64_t parameter = -1;
    Measure measure = Measure::kCoding;
    double value = 0;
    // The largest value that is sound.
    double limit = 0;
    // What codes the parameter, and what would be finer: for the log.
    std::string codec = {};
    std::string finer = {};
  };
  using Read = std::function<std::vector<Reading>(const float* numbers)>;

  // The option of every algorithm that is guarded.
  static OptionInfo option(Messages messages = Messages::kGradients);
  enum class Mode { kOff, kWarn, kAdapt };
  // Throws ValueError for another word.
  static Mode modeOf(const Options& options, Messages messages = Messages::kGradients);

  explicit Guard(Mode mode, Messages messages = Messages::kGradients) : mode_(mode), messages_(messages) {}

  [[nodiscard]] bool isOn() const { return mode_ != Mode::kOff; }
  [[nodiscard]] bool adapts() const { return mode_ == Mode::kAdapt; }
  // Returns the key that draws the places of a look at the bucket in this step, or nothing if no look is due. Of every
  // `window` steps two in a row are drawn for each bucket, with the same places, so that a verdict on these needs no
  // other look. All buckets are looked at in the first steps from `startStep` on, after the first of which DDP may lay
  // them out anew; none that a CUDA graph captures, which would repeat the look without end.
  [[nodiscard]] std::optional<uint64_t> keyOfLook(const Bucket& bucket, int64_t startStep, int64_t window = 128) const;

  // Before all else of a bucket: gives the verdicts on earlier steps, once for all buckets of a step. Those of the
  // bucket's parameters that are coded at another level from now on. Whoever comes as rank 0 says what there is to say;
  // of those that hold other shards than the first one line, and of the first parameter only.
  std::vector<int64_t> begin(const Bucket& bucket, int rank);
  // What a look at a bucket of the step has found; see Read.
  void note(int64_t step, const at::Tensor& numbers, Read read);
  // How many times finer than asked a parameter has to be coded.
  [[nodiscard]] int levelOf(int64_t parameter) const;
  [[nodiscard]] bool isAnyRaised() const;

  // By position; before the first step, where they are known.
  void useNames(std::vector<std::string> names);

  struct Report {
    int64_t looks = 0;
    int64_t alarms = 0;
    // By measure, the largest of what was read last of each parameter.
    std::array<double, kMeasures> worst = {};
    // Levels above 0, by parameter.
    std::map<std::string, int64_t> raised;
  };
  [[nodiscard]] Report report() const;

  // What a continued run needs to come to the same verdicts, the same on all ranks; undefined where there is nothing.
  // Between two steps.
  [[nodiscard]] at::Tensor state();
  // Throws ValueError for what state() did not make, or of parameters beyond so many; 0: it is not known how many.
  static void check(const at::Tensor& state, int64_t parameters);
  // Replaces all by what check() has let pass. A guard that does not adapt takes no notice of it.
  void load(const at::Tensor& state);

 private:
  // Of a parameter and a measure.
  struct Excursion {
    int64_t over = 0;
    bool isOut = false;
    double last = 0;
    // The user was told, for whom once is enough.
    bool isSaid = false;
  };
  struct Watched {
    int64_t level = 0;
    // When that changed last, and for how many steps it stays at least.
    int64_t since = 0;
    int64_t patience = 0;
    bool isNew = false;
    std::array<Excursion, kMeasures> excursions;
  };
  using WatchedByParameter = std::map<int64_t, Watched>;
  struct Pending {
    int64_t step = 0;
    GuardNumbers numbers;
    Read read;
  };

  static WatchedByParameter parsed(const at::Tensor& state, int64_t parameters);
  void settle(int64_t step, bool mayWait);
  void judge(const Reading& reading, int64_t step);
  void lower(int64_t step);
  [[nodiscard]] std::string nameOf(int64_t parameter) const;
  [[nodiscard]] std::string complaintOf(const Reading& reading) const;

  const Mode mode_;
  const Messages messages_;
  mutable std::mutex mutex_;
  bool isSpeaker_ = true;
  bool isOfFirstShards_ = true;
  // Other shards have said the one line that they have.
  bool hasSpoken_ = false;
  std::vector<std::string> names_;
  std::deque<Pending> pending_;
  WatchedByParameter watched_;
  int64_t looks_ = 0;
  int64_t alarms_ = 0;
};

}  // namespace bagua
