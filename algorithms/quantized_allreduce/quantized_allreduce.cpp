// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "algorithms/algorithm_interfaces.h"
#include "algorithms/quantized_allreduce/selection.h"
#include "algorithms/registry.h"
#include "algorithms/shared/compressed/collectives.h"
#include "algorithms/shared/compressed/feedback.h"
#include "algorithms/shared/compressed/mean.h"
#include "algorithms/shared/compressed/unused.h"
#include "kernels/codecs/raw/raw_codec.h"

namespace bagua {
namespace {

using quantized::Selection;

Rounding roundingOf(const std::string& name) {
  if (name == "nearest") return Rounding::kNearest;
  TORCH_CHECK_VALUE(name == "stochastic",
                    "option 'rounding' of algorithm 'quantized_allreduce' takes 'nearest' or 'stochastic', got '", name,
                    "'");
  return Rounding::kStochastic;
}

bool areSmall(const std::string& residuals) {
  if (residuals == "float32") return false;
  TORCH_CHECK_VALUE(residuals == "8bit",
                    "option 'residuals' of algorithm 'quantized_allreduce' takes 'float32' or '8bit', got '", residuals,
                    "'");
  return true;
}

// Mean of the gradients with few bits for most of them, and error feedback. The gradients of a bucket that are to stay
// exact, or that another codec takes, travel in the same messages.
class QuantizedAllReduce final : public Algorithm,
                                 public KeepsState,
                                 public KeepsResiduals,
                                 public ReducesToParts,
                                 public ReadsNames {
 public:
  QuantizedAllReduce(Selection selection, const compressed::MeanOptions& options, bool hasFeedback,
                     bool hasSmallResiduals, Rounding rounding)
      : selection_(std::move(selection)),
        options_(options),
        hasFeedback_(hasFeedback),
        rounding_(rounding),
        feedback_(hasSmallResiduals) {}

  void useParameters(const std::vector<ParameterFacts>& facts) override { selection_.useParameters(facts); }

  void checkNames(const std::optional<std::vector<std::string>>& names) const override { selection_.checkNames(names); }

  void reduce(Bucket& bucket, Communicator& communicator) override {
    if (bucket.flat.numel() == 0 || communicator.size() == 1) return;
    if (!compressed::isCoded(options_, communicator.topology())) {
      const Stage stage(bucket.seconds, stages::kAllReduce);
      communicator.allReduce(bucket.flat, options_.average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM);
      return;
    }
    if (hasFeedback_) feedback_.beginBucket(bucket.step);
    auto sections = sectionsOf(bucket);
    std::vector<compressed::Sum> sums;
    for (auto& section : sections) sums.push_back({section.flat, codingOf(bucket, section, options_, communicator)});
    const bool tellsUse = hasFeedback_ && bucket.tellsUse && isAnyCoded(sections);
    if (tellsUse) sums.push_back(compressed::sumOfUses(bucket));
    const auto isFinite = compressed::reduceToMeans(sums, options_, bucket.seconds, communicator);
    for (const auto& section : sections) section.scatterTo(bucket.flat);
    if (hasFeedback_) {
      forgetOthers(sections, sums.front(), options_, communicator);
      if (tellsUse) keepUnused(bucket, sections, sums, communicator);
      keepResiduals(bucket, sections, sums, options_, communicator);
      const Stage stage(bucket.seconds, stages::kCheck);
      feedback_.endBucket(bucket.flat, isFinite);
    }
  }

  void reduceToParts(Bucket& bucket, at::Tensor& own, Communicator& communicator) override {
    if (bucket.flat.numel() == 0) return;
    if (!compressed::isCoded(options_, communicator.topology())) {
      const Stage stage(bucket.seconds, stages::kReduceScatter);
      return communicator.reduceScatter(own, bucket.flat, options_.average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM);
    }
    if (hasFeedback_) feedback_.beginBucket(bucket.step);
    const auto options = compressed::optionsForParts(options_, communicator);
    Bucket arranged = inOrder(bucket, compressed::partsInLanes(options, communicator));
    auto sections = sectionsOf(arranged);
    std::vector<compressed::Sum> sums;
    std::vector<at::Tensor> owns;
    for (const auto& section : sections) {
      sums.push_back({section.flat, codingOf(arranged, section, options, communicator)});
      const bool isWhole = section.pieces.empty();
      owns.push_back(isWhole ? own : at::empty({section.flat.numel() / communicator.size()}, own.options()));
    }
    compressed::reduceToParts(sums, owns, options, bucket.seconds, communicator);
    for (size_t i = 0; i < sections.size(); ++i) sections[i].scatterPartTo(own, owns[i]);
    if (!hasFeedback_) return;
    forgetOthers(sections, sums.front(), options, communicator);
    keepResiduals(arranged, sections, sums, options, communicator);
    const Stage stage(bucket.seconds, stages::kCheck);
    feedback_.endBucket(own);
  }

  void agreeOnStep(at::Device device, Communicator& communicator) override {
    if (hasFeedback_) feedback_.agreeOnStep(device, communicator);
  }

  void passOver(Bucket& bucket, Communicator& communicator) override {
    if (!hasFeedback_ || !compressed::isCoded(options_, communicator.topology())) return;
    feedback_.beginBucket(bucket.step);
    const bool isInParts = bucket.isInParts;
    const auto options = isInParts ? compressed::optionsForParts(options_, communicator) : options_;
    Bucket arranged = isInParts ? inOrder(bucket, compressed::partsInLanes(options, communicator)) : bucket;
    for (const auto& section : sectionsOf(arranged)) {
      if (section.codec.empty()) continue;
      feedback_.passOver(bucketOf(arranged, section), section.codec, options, communicator);
    }
  }

  void endSparse(const at::Tensor& values, int64_t step) override {
    if (!hasFeedback_) return;
    feedback_.beginBucket(step);
    feedback_.endBucket(values);
  }

  [[nodiscard]] ReduceTraits traits() const override {
    const auto codecs = selection_.codecs();
    const bool draws = std::any_of(codecs.begin(), codecs.end(),
                                   [this](const auto& codec) { return codec->usesKey(roundingWith(*codec)); });
    return {.bucketsMayOverlap = true,
            .isStateless = !hasFeedback_,
            .isReplayable = !hasFeedback_ && !draws,
            .averagesSparse = options_.average};
  }
  [[nodiscard]] std::string whyUncoded(const HostTopology& topology) const override {
    return compressed::whyUncoded(options_, topology);
  }
  void rescale(double factor) override { feedback_.rescale(factor); }
  [[nodiscard]] int64_t stateBytes() const override { return feedback_.bytes(); }
  [[nodiscard]] AlgorithmState state() const override { return feedback_.state(); }
  void load(const AlgorithmState& state, StepContext& context) override { feedback_.load(state, context.parameters()); }

 private:
  // Gradients of a bucket that one codec takes, or that stay exact (no codec).
  struct Section {
    std::string codec;
    at::Tensor flat;
    std::vector<BucketEntry> entries;
    // Where the entries are in the bucket's flat tensor. Empty where the section is that tensor itself.
    std::vector<Piece> pieces;

    void scatterTo(const at::Tensor& whole) const {
      int64_t begin = 0;
      for (const auto& piece : pieces) {
        const int64_t length = piece.end - piece.begin;
        whole.narrow(0, piece.begin, length).copy_(flat.narrow(0, begin, length));
        begin += length;
      }
    }
    // The same of one part, where the flat tensor has one for each rank.
    void scatterPartTo(const at::Tensor& part, const at::Tensor& own) const {
      int64_t begin = 0;
      for (auto piece = pieces.begin(); piece != pieces.end() && begin < own.numel(); ++piece) {
        const int64_t length = piece->end - piece->begin;
        part.narrow(0, piece->begin, length).copy_(own.narrow(0, begin, length));
        begin += length;
      }
    }
  };

  // The bucket with its parts, one for each rank, in another order.
  static Bucket inOrder(const Bucket& bucket, const std::vector<int>& ranks) {
    if (std::is_sorted(ranks.begin(), ranks.end())) return bucket;
    const auto parts = bucket.flat.chunk(static_cast<int64_t>(ranks.size()));
    const size_t perPart = bucket.entries.size() / ranks.size();
    std::vector<at::Tensor> arranged;
    for (const int rank : ranks) arranged.push_back(parts[rank]);
    Bucket result = bucket;
    result.flat = at::cat(arranged);
    result.entries = std::vector<BucketEntry>();
    int64_t begin = 0;
    for (const int rank : ranks) {
      for (size_t i = rank * perPart; i < (rank + 1) * perPart; ++i) {
        const BucketEntry& entry = bucket.entries[i];
        const int64_t length = entry.gradient.numel();
        const at::Tensor place = result.flat.narrow(0, begin, length).view(entry.gradient.sizes());
        result.entries.push_back({entry.parameter, place, entry.isUsed});
        begin += length;
      }
    }
    return result;
  }

  // The largest first. It is the bucket's own tensor, with zeros in the places of the others, unless these are many: a
  // copy of all would cost more than a few zeros on the line.
  [[nodiscard]] std::vector<Section> sectionsOf(const Bucket& bucket) const {
    std::map<std::string, Section> byCodec;
    int64_t begin = 0;
    for (const auto& entry : bucket.entries) {
      const std::string codec = selection_.codecOf(entry.parameter, entry.gradient);
      Section& section = byCodec[codec];
      section.codec = codec;
      section.entries.push_back(entry);
      section.pieces.push_back({begin, begin + entry.gradient.numel()});
      begin += entry.gradient.numel();
    }
    TORCH_INTERNAL_ASSERT(begin == bucket.flat.numel());
    std::vector<Section> sections;
    for (auto& [codec, section] : byCodec) sections.push_back(std::move(section));
    std::stable_sort(sections.begin(), sections.end(),
                     [](const Section& a, const Section& b) { return lengthOf(a) > lengthOf(b); });
    const bool keepsPlace = lengthOf(sections.front()) * 4 >= bucket.flat.numel() * 3;
    for (size_t i = keepsPlace ? 1 : 0; i < sections.size(); ++i) {
      std::vector<at::Tensor> values;
      for (const auto& piece : sections[i].pieces) values.push_back(elementsOf(bucket.flat, piece));
      sections[i].flat = at::cat(values);
      if (!keepsPlace) continue;
      for (const auto& value : values) value.zero_();
    }
    if (!keepsPlace) return sections;
    Section& first = sections.front();
    first.flat = bucket.flat;
    first.entries = bucket.entries.all();
    first.pieces.clear();
    return sections;
  }

  // Zeros in the places of the others may have been coded as something else, which nobody sees: there is nothing to
  // make good.
  static void forgetOthers(const std::vector<Section>& sections, const compressed::Sum& first,
                           const compressed::MeanOptions& options, const Communicator& communicator) {
    const bool keepsPlace = sections.front().pieces.empty() && !sections.front().codec.empty();
    if (!keepsPlace) return;
    const compressed::CodedLanes coded(options, first.flat.numel(), communicator);
    std::vector<Piece> owned;
    if (!options.isToParts) owned = compressed::ownPieces(coded.lanes, communicator.rank());
    for (size_t i = 1; i < sections.size(); ++i) {
      for (const auto& piece : sections[i].pieces) {
        elementsOf(first.coding.sender.nextResidual, piece).zero_();
        for (const auto& part : compressed::overlapsWithin(owned, piece)) {
          elementsOf(first.coding.owner.nextResidual, part).zero_();
        }
      }
    }
  }

  // The last of the sums tells what the ranks have used.
  void keepUnused(const Bucket& bucket, const std::vector<Section>& sections, const std::vector<compressed::Sum>& sums,
                  const Communicator& communicator) const {
    const at::Tensor& areUsed = sums.back().flat;
    std::map<int64_t, int64_t> places;
    for (const auto& entry : bucket.entries) places.emplace(entry.parameter, places.size());
    for (size_t i = 0; i < sections.size(); ++i) {
      if (sections[i].codec.empty()) continue;
      std::vector<at::Tensor> ofEntries;
      for (const auto& entry : sections[i].entries) {
        ofEntries.push_back(areUsed.select(0, places.at(entry.parameter)));
      }
      feedback_.keepUnused(bucketOf(bucket, sections[i]), at::stack(ofEntries), options_, communicator, sums[i].coding);
    }
    compressed::clearUnused(bucket, areUsed);
  }

  static bool isAnyCoded(const std::vector<Section>& sections) {
    return std::any_of(sections.begin(), sections.end(), [](const Section& section) { return !section.codec.empty(); });
  }

  static at::Tensor elementsOf(const at::Tensor& flat, const Piece& piece) {
    return flat.narrow(0, piece.begin, piece.end - piece.begin);
  }

  [[nodiscard]] Rounding roundingWith(const Codec& codec) const {
    return codec.canRoundStochastically() ? rounding_ : Rounding::kNearest;
  }

  static int64_t lengthOf(const Section& section) {
    int64_t length = 0;
    for (const auto& piece : section.pieces) length += piece.end - piece.begin;
    return length;
  }

  compressed::Coding codingOf(const Bucket& bucket, const Section& section, const compressed::MeanOptions& options,
                              const Communicator& communicator) {
    if (section.codec.empty()) return {.codec = rawCodec(bucket.flat.scalar_type())};
    const auto& codec = CodecRegistry::find(section.codec).codec;
    compressed::Coding coding = compressed::codingOf(codec, bucket.key);
    coding.sender.rounding = coding.owner.rounding = roundingWith(*codec);
    if (hasFeedback_) feedback_.useFor(bucketOf(bucket, section), section.codec, options, communicator, coding);
    return coding;
  }

  void keepResiduals(Bucket& bucket, const std::vector<Section>& sections, const std::vector<compressed::Sum>& sums,
                     const compressed::MeanOptions& options, const Communicator& communicator) {
    const Stage stage(bucket.seconds, stages::kKeepResiduals);
    for (size_t i = 0; i < sections.size(); ++i) {
      if (sections[i].codec.empty()) continue;
      feedback_.keep(bucketOf(bucket, sections[i]), sections[i].codec, options, communicator, sums[i].coding);
    }
  }

  static Bucket bucketOf(const Bucket& whole, const Section& section) {
    return {.flat = section.flat, .entries = section.entries, .tellsUse = whole.tellsUse, .retained = whole.retained};
  }

  Selection selection_;
  const compressed::MeanOptions options_;
  const bool hasFeedback_;
  const Rounding rounding_;
  compressed::Feedback feedback_;
};

}  // namespace

BAGUA_REGISTER_ALGORITHM({
    .name = "quantized_allreduce",
    .summary = "Mean of the gradients with 4 bits or fewer, and error feedback.",
    .position = 8,
    .agreement = Agreement::kIdentical,
    .relativeError = 0.15,
    .options =
        {{"codec", std::string("4bit"),
          "One of bagua.available_codecs(), or a mapping from patterns of parameters' names to codecs, of which "
          "the first that fits counts; the last is '*'.",
          true},
         {"error_feedback", true,
          "Whether what coding leaves behind is added to the next step's gradients, at the sender and at the "
          "owner of a chunk."},
         {"residuals", std::string("float32"),
          "How error feedback keeps what is left behind: 'float32', or '8bit', a moving average in a quarter of the "
          "memory."},
         {"exact", std::string(quantized::kExactByDefault),
          "What travels uncoded in the same messages: '1d' (biases, norms), 'embedding', 'head' (the last linear "
          "layer), 'small' (below 1024 elements), and patterns of parameters' names."},
         {"rounding", std::string("nearest"), "'nearest' or 'stochastic' (unbiased, with a larger error)."},
         {"hierarchical", true,
          "Full precision inside a host, coded between hosts (on a single host nothing is coded); False: coded "
          "between all ranks."},
         {"average", true, "Mean over the ranks; False: sum."}},
    .create = [](const Options& options) -> std::unique_ptr<Algorithm> {
      Selection selection(options.get<std::string>("codec"), options.get<std::string>("exact"));
      return std::make_unique<QuantizedAllReduce>(
          std::move(selection),
          compressed::MeanOptions{.hierarchical = options.get<bool>("hierarchical"),
                                  .average = options.get<bool>("average")},
          options.get<bool>("error_feedback"), areSmall(options.get<std::string>("residuals")),
          roundingOf(options.get<std::string>("rounding")));
    },
})

}  // namespace bagua
