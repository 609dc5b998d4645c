// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/guard/guard.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <utility>

#include "kernels/integers.h"

namespace bagua {
namespace {

// In so many steps, from the first that is coded on, the guard looks at every bucket.
constexpr int64_t kFirstSteps = 2;
// Looks in a row that have to find the same: a single one may be a step that is unlike the others.
constexpr int64_t kLooks = 2;
// The seed of the draws of steps and places.
constexpr uint64_t kSeed = 1;
// A level stays for so many steps at first. Each return doubles them.
constexpr int64_t kPatience = 1000;
// More than there are codecs to be finer than.
constexpr int64_t kHighestLevel = 100;
// A checkpoint's columns: parameter, level, since, patience, isNew, and two for each measure.
constexpr int64_t kColumns = 5 + 2 * Guard::kMeasures;

std::string shown(double value) {
  std::ostringstream text;
  text.precision(2);
  text << value;
  return text.str();
}

}  // namespace

OptionInfo Guard::option(Messages messages) {
  const std::string adapts = messages == Messages::kGradients ? ", 'adapt' also codes that finer" : "";
  return {.name = "guard",
          .defaultValue = std::string("warn"),
          .summary = "'warn' logs where coding loses too much" + adapts + "; None: looks at nothing.",
          .alsoTakes = std::string()};
}

Guard::Mode Guard::modeOf(const Options& options, Messages messages) {
  const auto& word = options.get<std::string>("guard");
  if (word.empty()) return Mode::kOff;
  TORCH_CHECK_VALUE(word != "adapt" || messages == Messages::kGradients,
                    "bagua: guard='adapt' is for algorithms that code gradients: of differences of weights each rank "
                    "looks at its own messages, so that the ranks would not code finer at the same time. Take "
                    "guard='warn', and a codec of more bits where it warns");
  TORCH_CHECK_VALUE(word == "warn" || word == "adapt", "bagua: guard must be ",
                    messages == Messages::kGradients ? "None, 'warn' or 'adapt'" : "None or 'warn'", ", got '", word,
                    "'");
  return word == "warn" ? Mode::kWarn : Mode::kAdapt;
}

std::string Guard::complaintOf(const Reading& reading) const {
  const std::string value = shown(reading.value);
  const std::string limit = shown(reading.limit);
  const std::string message = messages_ == Messages::kGradients ? "gradient" : "difference";
  switch (reading.measure) {
    case Measure::kCoding:
      return "coding with " + reading.codec + " loses " + value + " of its " + message +
             "'s squared norm, outliers apart; up to " + limit + " is sound";
    case Measure::kMean:
      return "the mean that " + reading.codec + " gives is off by " + value +
             " of the true mean's squared norm; up to " + limit + " is sound";
    case Measure::kResidual:
      return "error feedback of " + reading.codec + " holds back " + value + " times the squared norm of its " +
             message + "; up to " + limit + " is sound";
  }
  TORCH_INTERNAL_ASSERT(false);
}

std::optional<uint64_t> Guard::keyOfLook(const Bucket& bucket, int64_t startStep, int64_t window) const {
  if (!isOn() || bucket.isCaptured) return std::nullopt;
  const auto keyOfWindow = [&](int64_t step) { return mix64(bucketKey(kSeed, step / window, bucket.firstParameter)); };
  if (bucket.step < startStep + kFirstSteps) return keyOfWindow(startStep);
  const uint64_t key = keyOfWindow(bucket.step);
  const auto first = static_cast<int64_t>(key % static_cast<uint64_t>(window - kLooks + 1));
  const int64_t sinceFirst = bucket.step % window - first;
  return sinceFirst >= 0 && sinceFirst < kLooks ? std::optional(key) : std::nullopt;
}

std::vector<int64_t> Guard::begin(const Bucket& bucket, int rank) {
  // While a graph is captured nobody may ask what a device has done.
  if (!isOn() || bucket.isCaptured) return {};
  const std::lock_guard<std::mutex> lock(mutex_);
  isSpeaker_ = rank == 0;
  isOfFirstShards_ = bucket.isOfFirstShards;
  settle(bucket.step, adapts());
  if (!adapts()) return {};
  lower(bucket.step);
  const auto isNew = [](const auto& entry) { return entry.second.isNew; };
  if (std::none_of(watched_.begin(), watched_.end(), isNew)) return {};
  std::vector<int64_t> changed;
  for (const int64_t parameter : positionsOf(bucket.entries)) {
    const auto found = watched_.find(parameter);
    if (found != watched_.end() && std::exchange(found->second.isNew, false)) changed.push_back(parameter);
  }
  return changed;
}

// Ranks that adapt have to do so at the same step, and wait for numbers that have not come within one. In the others
// a verdict may be late.
void Guard::settle(int64_t step, bool mayWait) {
  while (!pending_.empty() && pending_.front().step < step) {
    const Pending& oldest = pending_.front();
    if (!mayWait && !oldest.numbers.haveCome()) return;
    const at::Tensor values = oldest.numbers.values();
    for (const auto& reading : oldest.read(values.const_data_ptr<float>())) judge(reading, oldest.step + 1);
    pending_.pop_front();
  }
}

void Guard::judge(const Reading& reading, int64_t step) {
  // GradScaler skips such a step, or the gradient was zeros.
  if (!std::isfinite(reading.value)) return;
  Watched& watched = watched_[reading.parameter];
  // Another reading of the same look has just raised the level: this one is of the coarser codec, too.
  if (watched.level > 0 && watched.since == step) return;
  Excursion& excursion = watched.excursions[static_cast<int>(reading.measure)];
  excursion.last = reading.value;
  if (reading.value <= reading.limit) {
    excursion.over = 0;
    excursion.isOut = excursion.isOut && reading.value > reading.limit / 2;
    return;
  }
  if (++excursion.over < kLooks || excursion.isOut) return;
  ++alarms_;
  std::string advice = ". With guard='adapt' it would be coded finer";
  if (messages_ == Messages::kDifferences) {
    // Not every algorithm can send float32.
    advice = reading.finer == "float32" ? "" : ". Coded with " + reading.finer + " it would lose less";
  }
  excursion.isOut = true;
  if (adapts()) {
    watched.excursions = {};
    ++watched.level;
    watched.since = step;
    watched.patience = std::max(watched.patience, kPatience);
    watched.isNew = true;
    advice = ". From step " + std::to_string(step) + " on it is coded with " + reading.finer;
  }
  if (!isSpeaker_ || std::exchange(excursion.isSaid, !adapts())) return;
  // The first shard says what most of them have. Another may have what that has not: one line tells where to look.
  if (!isOfFirstShards_ && std::exchange(hasSpoken_, true)) return;
  LOG(WARNING) << "bagua: '" << nameOf(reading.parameter)
               << (isOfFirstShards_ ? "'" : "', in another shard than the first,") << " at step " << step - 1 << ": "
               << complaintOf(reading) << advice;
}

void Guard::lower(int64_t step) {
  for (auto& [parameter, watched] : watched_) {
    if (watched.level == 0 || step - watched.since < watched.patience) continue;
    --watched.level;
    watched.since = step;
    watched.patience *= 2;
    watched.isNew = true;
    if (!isSpeaker_ || !isOfFirstShards_) continue;
    LOG(WARNING) << "bagua: '" << nameOf(parameter) << "' is coded a level coarser again from step " << step
                 << " on; if that does not do, it stays finer for " << watched.patience << " steps";
  }
}

void Guard::note(int64_t step, const at::Tensor& numbers, Read read) {
  GuardNumbers kept(numbers);
  // Those of later steps would wait behind it forever.
  if (!adapts() && !kept.tellWhenTheyCome()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  ++looks_;
  pending_.push_back({step, std::move(kept), std::move(read)});
}

int Guard::levelOf(int64_t parameter) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = watched_.find(parameter);
  return found == watched_.end() ? 0 : static_cast<int>(found->second.level);
}

bool Guard::isAnyRaised() const {
  if (!adapts()) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(watched_.begin(), watched_.end(), [](const auto& entry) { return entry.second.level > 0; });
}

void Guard::useNames(std::vector<std::string> names) {
  const std::lock_guard<std::mutex> lock(mutex_);
  names_ = std::move(names);
}

std::string Guard::nameOf(int64_t parameter) const {
  if (parameter >= 0 && parameter < static_cast<int64_t>(names_.size())) return names_[parameter];
  return "parameter " + std::to_string(parameter);
}

Guard::Report Guard::report() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Report report;
  report.looks = looks_;
  report.alarms = alarms_;
  for (const auto& [parameter, watched] : watched_) {
    if (watched.level > 0) report.raised.emplace(nameOf(parameter), watched.level);
    for (int i = 0; i < kMeasures; ++i) report.worst[i] = std::max(report.worst[i], watched.excursions[i].last);
  }
  return report;
}

at::Tensor Guard::state() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!adapts()) return {};
  settle(std::numeric_limits<int64_t>::max(), true);
  if (watched_.empty()) return {};
  at::Tensor table = at::empty({static_cast<int64_t>(watched_.size()), kColumns}, at::kLong);
  auto* cell = table.mutable_data_ptr<int64_t>();
  for (const auto& [parameter, watched] : watched_) {
    for (const int64_t value : {parameter, watched.level, watched.since, watched.patience, int64_t{watched.isNew}}) {
      *cell++ = value;
    }
    for (const auto& excursion : watched.excursions) {
      *cell++ = excursion.over;
      *cell++ = excursion.isOut ? 1 : 0;
    }
  }
  return table;
}

Guard::WatchedByParameter Guard::parsed(const at::Tensor& state, int64_t parameters) {
  WatchedByParameter all;
  if (!state.defined()) return all;
  TORCH_CHECK_VALUE(state.scalar_type() == at::kLong && state.dim() == 2 && state.size(1) == kColumns,
                    "bagua: 'guard' of the checkpoint must be a table of ", kColumns, " columns, got ",
                    state.scalar_type(), " ", state.sizes());
  const at::Tensor table = state.cpu().contiguous();
  const auto* cell = table.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < table.size(0); ++row) {
    const int64_t parameter = *cell++;
    TORCH_CHECK_VALUE(parameter >= 0 && (parameters == 0 || parameter < parameters),
                      "bagua: 'guard' of the checkpoint has parameter ", parameter, ", this model has ", parameters,
                      " trainable parameters");
    Watched& watched = all[parameter];
    watched.level = *cell++;
    watched.since = *cell++;
    watched.patience = *cell++;
    watched.isNew = *cell++ != 0;
    TORCH_CHECK_VALUE(watched.level >= 0 && watched.level <= kHighestLevel && watched.patience >= 0,
                      "bagua: 'guard' of the checkpoint has level ", watched.level, " of parameter ", parameter);
    for (auto& excursion : watched.excursions) {
      excursion.over = *cell++;
      excursion.isOut = *cell++ != 0;
    }
  }
  return all;
}

void Guard::check(const at::Tensor& state, int64_t parameters) { static_cast<void>(parsed(state, parameters)); }

void Guard::load(const at::Tensor& state) {
  auto loaded = adapts() ? parsed(state, 0) : WatchedByParameter();
  const std::lock_guard<std::mutex> lock(mutex_);
  watched_ = std::move(loaded);
  pending_.clear();
}

}  // namespace bagua
