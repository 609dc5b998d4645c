// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/coded_gradients.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <map>

#include "algorithms/shared/compressed/collectives.h"
#include "algorithms/shared/compressed/ladder.h"
#include "algorithms/shared/compressed/slots.h"
#include "algorithms/shared/compressed/unused.h"
#include "kernels/codecs/raw/raw_codec.h"

namespace bagua::compressed {
namespace {

Bucket bucketOf(const Bucket& whole, const CodecSection& section) {
  return {.flat = section.flat, .entries = section.entries, .tellsUse = whole.tellsUse, .retained = whole.retained};
}

}  // namespace

void CodedGradients::reduce(Bucket& bucket, Communicator& communicator) {
  if (bucket.flat.numel() == 0 || communicator.size() == 1) return;
  if (isExactIn(bucket, communicator)) {
    return reduceExactly(bucket.flat, options_.mean, bucket.seconds, communicator);
  }
  Coded coded = begin(bucket, communicator);
  auto& [mean, sections, sums] = coded;
  addSums(bucket, coded, communicator);
  const Looks looks = lookAt(bucket, coded, communicator);
  for (const auto& [i, look] : looks) sums.push_back({look.numbers(), {.codec = rawCodec(at::kFloat)}});
  const bool tellsUse =
      hasFeedback_ && bucket.tellsUse &&
      std::any_of(sections.begin(), sections.end(), [this](const auto& one) { return keepsResidualsOf(one); });
  if (tellsUse) sums.push_back(sumOfUses(bucket));
  const auto isFinite = reduceToMeans(sums, mean, bucket.seconds, communicator);
  if (!looks.empty()) {
    const Stage stage(bucket.seconds, stages::kGuard);
    size_t place = sections.size();
    for (const auto& [i, look] : looks) look.tell(guard_, bucket.step, sections[i].flat, sums[place++].flat);
  }
  for (const auto& section : sections) section.scatterTo(bucket.flat);
  if (!hasFeedback_) return;
  forgetOthers(coded, communicator);
  if (tellsUse) keepUnused(bucket, coded, communicator);
  keepResiduals(bucket, coded, communicator);
  const Stage stage(bucket.seconds, stages::kCheck);
  feedback_.endBucket(bucket.flat, isFinite);
}

void CodedGradients::reduceToParts(Bucket& bucket, at::Tensor& own, Communicator& communicator) {
  if (bucket.flat.numel() == 0) return;
  if (isExactIn(bucket, communicator)) {
    return reduceExactlyToParts(bucket.flat, own, options_.mean, bucket.seconds, communicator);
  }
  Coded coded = begin(bucket, communicator);
  addSums(bucket, coded, communicator);
  for (const auto& [i, look] : lookAt(bucket, coded, communicator)) {
    const Stage stage(bucket.seconds, stages::kGuard);
    // All ranks need them, and what travels to parts reaches one each.
    at::Tensor numbers = look.numbers();
    communicator.allReduce(numbers, c10d::ReduceOp::AVG);
    look.tell(guard_, bucket.step, coded.sections[i].flat, numbers);
  }
  std::vector<at::Tensor> owns;
  for (const auto& section : coded.sections) {
    const bool isWhole = section.pieces.empty();
    owns.push_back(isWhole ? own : at::empty({section.flat.numel() / communicator.size()}, own.options()));
  }
  compressed::reduceToParts(coded.sums, owns, coded.mean, bucket.seconds, communicator);
  for (size_t i = 0; i < owns.size(); ++i) coded.sections[i].scatterPartTo(own, owns[i]);
  if (!hasFeedback_) return;
  forgetOthers(coded, communicator);
  keepResiduals(bucket, coded, communicator);
  const Stage stage(bucket.seconds, stages::kCheck);
  feedback_.endBucket(own);
}

void CodedGradients::passOverResiduals(Bucket& bucket, Communicator& communicator) {
  if (!hasFeedback_ || bucket.flat.numel() == 0 || isExactIn(bucket, communicator)) return;
  const Coded coded = begin(bucket, communicator);
  for (const auto& section : coded.sections) {
    if (!keepsResidualsOf(section)) continue;
    feedback_.passOver(bucketOf(bucket, section), section.codec, coded.mean, communicator);
  }
}

void CodedGradients::endSparse(const at::Tensor& values, int64_t step) {
  if (!hasFeedback_) return;
  feedback_.beginBucket(step);
  feedback_.endBucket(values);
}

ReduceTraits CodedGradients::traits() const {
  const auto codecs = selection_.codecs();
  const bool draws = std::any_of(codecs.begin(), codecs.end(), [this](const auto* codec) {
    return codec->codec->usesKey(roundingWith(*codec->codec));
  });
  return {.bucketsMayOverlap = true,
          // What the guard keeps is read where and when it was made.
          .isStateless = !hasFeedback_,
          .isReplayable = !hasFeedback_ && !draws && !guard_.adapts() && options_.startStep == 0,
          .sendsByStep = options_.startStep > 0 || guard_.isOn(),
          .averagesSparse = options_.mean.average};
}

CodedGradients::Coded CodedGradients::begin(Bucket& bucket, const Communicator& communicator) {
  const MeanOptions mean = bucket.isInParts ? optionsForParts(options_.mean, communicator) : options_.mean;
  const int parts = bucket.isInParts ? communicator.size() : 1;
  if (bucket.isInParts) arrangeParts(bucket, partsInLanes(mean, communicator));
  const auto changed = guard_.begin(bucket, communicator.rank());
  // What they hold was coded by another codec.
  if (!changed.empty()) feedback_.forget(inAllParts(changed, bucket.entries, parts), *bucket.retained);
  // Also of buckets without: a step that any of them spoils leaves no trace in the residuals.
  if (hasFeedback_) feedback_.beginBucket(bucket.step);
  return {.mean = mean, .sections = divide(bucket, parts), .sums = {}};
}

void CodedGradients::addSums(const Bucket& bucket, Coded& coded, const Communicator& communicator) {
  for (const auto& section : coded.sections) {
    coded.sums.push_back({section.flat, codingOf(bucket, section, coded.mean, communicator)});
  }
}

CodedGradients::Looks CodedGradients::lookAt(Bucket& bucket, const Coded& coded,
                                             const Communicator& communicator) const {
  Looks looks;
  const auto key = guard_.keyOfLook(bucket, options_.startStep);
  if (!key) return looks;
  const Stage stage(bucket.seconds, stages::kGuard);
  for (size_t i = 0; i < coded.sections.size(); ++i) {
    const auto& [codec, flat, entries, pieces] = coded.sections[i];
    if (codec.empty() || flat.numel() == 0) continue;
    looks.emplace(i, CodingLook(flat, entries, codec, coded.sums[i].coding, coded.mean, communicator, *key));
  }
  return looks;
}

std::vector<CodecSection> CodedGradients::divide(const Bucket& bucket, int parts) const {
  if (const auto codec = selection_.onlyCodec(); codec && !guard_.isAnyRaised()) {
    return {{.codec = *codec, .flat = bucket.flat, .entries = bucket.entries, .pieces = {}}};
  }
  const auto codecOf = [this](const BucketEntry& entry) {
    return finerThan(selection_.codecOf(entry.parameter, entry.gradient), guard_.levelOf(entry.parameter));
  };
  return sectionsOf(bucket, codecOf, parts);
}

Coding CodedGradients::codingOf(const Bucket& bucket, const CodecSection& section, const MeanOptions& mean,
                                const Communicator& communicator) {
  if (section.codec.empty()) return {.codec = rawCodec(bucket.flat.scalar_type())};
  const auto& codec = CodecRegistry::find(section.codec).codec;
  Coding coding = compressed::codingOf(codec, bucket.key);
  coding.sender.rounding = coding.owner.rounding = roundingWith(*codec);
  if (keepsResidualsOf(section)) {
    feedback_.useFor(bucketOf(bucket, section), section.codec, mean, communicator, coding);
  }
  return coding;
}

// Zeros in the places of the others may have been coded as something else, which nobody sees: there is nothing to
// make good.
void CodedGradients::forgetOthers(const Coded& coded, const Communicator& communicator) const {
  const auto& [mean, sections, sums] = coded;
  const bool keepsPlace = sections.front().pieces.empty();
  if (!keepsPlace || !keepsResidualsOf(sections.front())) return;
  const Sum& first = sums.front();
  const CodedLanes lanes(mean, first.flat.numel(), communicator);
  std::vector<Piece> owned;
  // The owner of a part does not code it.
  if (!mean.isToParts) owned = ownPieces(lanes.lanes, communicator.rank());
  for (size_t i = 1; i < sections.size(); ++i) {
    for (const auto& piece : sections[i].pieces) {
      elementsOf(first.coding.sender.nextResidual, piece).zero_();
      for (const auto& part : overlapsWithin(owned, piece)) {
        elementsOf(first.coding.owner.nextResidual, part).zero_();
      }
    }
  }
}

// The last of the sums tells what the ranks have used.
void CodedGradients::keepUnused(const Bucket& bucket, const Coded& coded, const Communicator& communicator) const {
  const auto& [mean, sections, sums] = coded;
  const at::Tensor& areUsed = sums.back().flat;
  std::map<int64_t, int64_t> places;
  for (const auto& entry : bucket.entries) places.emplace(entry.parameter, places.size());
  for (size_t i = 0; i < sections.size(); ++i) {
    if (!keepsResidualsOf(sections[i])) continue;
    std::vector<at::Tensor> ofEntries;
    for (const auto& entry : sections[i].entries) {
      ofEntries.push_back(areUsed.select(0, places.at(entry.parameter)));
    }
    feedback_.keepUnused(bucketOf(bucket, sections[i]), at::stack(ofEntries), mean, communicator, sums[i].coding);
  }
  clearUnused(bucket, areUsed);
}

void CodedGradients::keepResiduals(Bucket& bucket, const Coded& coded, const Communicator& communicator) {
  const Stage stage(bucket.seconds, stages::kKeepResiduals);
  const auto& [mean, sections, sums] = coded;
  for (size_t i = 0; i < sections.size(); ++i) {
    if (!keepsResidualsOf(sections[i])) continue;
    feedback_.keep(bucketOf(bucket, sections[i]), sections[i].codec, mean, communicator, sums[i].coding);
  }
}

bool CodedGradients::isFeedbackOnForAny() const {
  const auto codecs = selection_.codecs();
  return std::any_of(codecs.begin(), codecs.end(), [this](const auto* codec) {
    for (std::string name = codec->name; !name.empty(); name = guard_.adapts() ? finerThan(name, 1) : "") {
      if (options_.feedback.isOnFor(CodecRegistry::find(name))) return true;
    }
    return false;
  });
}

bool CodedGradients::keepsResidualsOf(const CodecSection& section) const {
  return hasFeedback_ && !section.codec.empty() && options_.feedback.isOnFor(CodecRegistry::find(section.codec));
}

}  // namespace bagua::compressed
