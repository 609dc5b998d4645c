// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/coding_look.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "algorithms/shared/compressed/ladder.h"
#include "algorithms/shared/compressed/slots.h"
#include "backend/os/scratch_memory.h"
#include "kernels/device_ways.h"

namespace bagua::compressed {
namespace {

// Elements of a sample: what a cache holds.
constexpr int64_t kSample = 1 << 16;
// Differences of parameters with fewer elements share the scales of their neighbours, which error feedback makes good:
// they are not looked at. Of the others it is so many at least.
constexpr int64_t kFewest = 512;
// Of how many coded elements one travels in float32, and how many at least and at most.
constexpr int64_t kCodedOfExact = 64;
constexpr int64_t kFewestExact = 128;
constexpr int64_t kMostExact = 1 << 13;
// A larger magnitude than this many typical ones counts as that.
constexpr double kOutlier = 4;
// Stochastic rounding, whose scales no value exceeds, loses up to so many times as much: five with 2 bits.
constexpr double kStochastic = 8;
// Numbers of each parameter.
constexpr int64_t kColumns = 4;
// Sums travel with gradients that are finite, and must not make the step a lost one. Those of a parameter with larger
// numbers are of as many times smaller ones, which leaves their ratios; only a residual may be larger still.
constexpr double kLargestNumber = 0x1p40;
constexpr double kLargestSum = 0x1p100;
// Means of smaller squares come from numbers that codecs make zeros of, see kernels/README.md.
constexpr double kLeastSquare = 0x1p-160;
// Error feedback holds back less than this many squared norms of a gradient as long as it brings back what it holds.
constexpr double kSoundResidual = 4;
// Differences shrink with the learning rate, at once, and residuals some rounds later.
constexpr double kNoLimit = std::numeric_limits<double>::infinity();
// Errors of several codings, and of the step before, add up in a mean.
constexpr double kErrorsOfMean = 4;

// The chunk of a message that the key draws.
Piece chunkToLookAt(const HostLanes& lanes, uint64_t key) {
  const int lane = static_cast<int>((key >> 8U) % lanes.count());
  const int host = static_cast<int>((key >> 16U) % lanes.hostCount());
  const Piece chunk = chunkOf(lanes, lane, host);
  return chunk.begin < chunk.end ? chunk : chunkOf(lanes, 0, 0);
}

// A part of the chunk that begins where a group does.
Piece placeOfSample(const Piece& chunk, int64_t groupElements, uint64_t key) {
  const int64_t length = chunk.end - chunk.begin;
  const int64_t longest = kSample / groupElements * groupElements;
  if (length <= longest) return {0, length};
  const auto places = static_cast<uint64_t>((length - longest) / groupElements + 1);
  const auto begin = static_cast<int64_t>((key >> 24U) % places) * groupElements;
  return {begin, begin + longest};
}

// Whole groups that hold nothing but `elements`, at most so many elements of them; none where there are none.
Piece groupsOf(const Piece& elements, int64_t groupElements, int64_t most, uint64_t key) {
  const int64_t first = (elements.begin + groupElements - 1) / groupElements;
  const int64_t count = elements.end / groupElements - first;
  const int64_t taken = std::min(count, std::max<int64_t>(most / groupElements, 1));
  const int64_t begin = first + static_cast<int64_t>((key >> 8U) % static_cast<uint64_t>(count - taken + 1));
  return {begin * groupElements, (begin + taken) * groupElements};
}

double soundLossWith(const std::string& codec, Rounding rounding) {
  return soundLossOf(codec) * (rounding == Rounding::kStochastic ? kStochastic : 1);
}

at::ScalarType typeOf(const at::Tensor& values) {
  return values.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// A part of a chunk, as it is decoded. A device takes chunks whole.
at::Tensor decodedPart(const Codec& codec, const at::Tensor& chunk, const Piece& part, const Encoding& encoding) {
  at::Tensor packed = scratchTensor({codec.layout().packedBytes(chunk.numel())}, chunk.options().dtype(at::kByte));
  codec.start(chunk, encoding, packed);
  codec.encode(chunk, part, encoding, packed);
  at::Tensor sums = at::zeros({part.end - part.begin}, chunk.options().dtype(typeOf(chunk)));
  codec.decodeAdd(packed, part, chunk.scalar_type(), sums);
  return sums;
}

at::Tensor squared(const at::Tensor& values) { return values.square().sum(); }

// Without outliers: a typical magnitude is what the square roots of those that are not zero have as their mean.
at::Tensor squaredWithoutOutliers(const at::Tensor& values) {
  const at::Tensor magnitudes = values.abs();
  const at::Tensor root = magnitudes.sqrt().sum() / (magnitudes != 0).sum().clamp_min(1);
  return squared(at::minimum(magnitudes, root.square() * kOutlier));
}

}  // namespace

CodingLook::CodingLook(const at::Tensor& flat, const BucketEntries& entries, std::string codec, const Coding& coding,
                       const MeanOptions& options, const Communicator& communicator, uint64_t key)
    : codec_(std::move(codec)), soundLoss_(soundLossWith(codec_, coding.sender.rounding)) {
  const CodedLanes coded(options, flat.numel(), communicator);
  const Piece chunk = chunkToLookAt(coded.lanes, key);
  const Piece whole{0, chunk.end - chunk.begin};
  const auto& codes = *coding.codec;
  const Piece part = worksOnCpu(flat) ? placeOfSample(chunk, codes.layout().groupElements, key) : whole;
  sample_ = {chunk.begin + part.begin, chunk.begin + part.end};
  const Encoding encoding{.rounding = coding.sender.rounding, .key = coding.sender.key};
  const at::Tensor received = decodedPart(codes, elementsOf(flat, chunk), part, encoding);
  const at::Tensor sample = elementsOf(flat, sample_).to(typeOf(flat));
  // Residuals of the lanes of a host are those of another tensor.
  const bool hasResidual = coding.sender.hasFeedback() && coded.lanes.count() == 1;
  const at::Tensor residual = hasResidual ? elementsOf(coding.sender.residual, sample_) : at::Tensor();
  seen_ = seenIn(entries, options.isToParts ? entries.size() / communicator.size() : entries.size());
  if (!options.isToParts) chooseExact(std::clamp(flat.numel() / kCodedOfExact, kFewestExact, kMostExact));
  // The sum of all ranks', too, has to be finite.
  const double most = std::numeric_limits<float>::max() / static_cast<double>(communicator.size());
  const at::Tensor exact = elementsOf(flat, exact_).to(typeOf(flat)).clamp(-most, most);
  numbers_ = at::cat({lossesOf(sample, received, residual), exact.to(at::kFloat)});
}

CodingLook::CodingLook(const at::Tensor& differences, int64_t begin, const BucketEntries& entries, std::string codec,
                       const Encoding& encoding)
    : codec_(std::move(codec)), soundLoss_(soundLossWith(codec_, encoding.rounding)) {
  const auto& codes = *CodecRegistry::find(codec_).codec;
  const int64_t most = std::max(kSample / static_cast<int64_t>(entries.size()), kFewest);
  std::vector<at::Tensor> samples;
  std::vector<at::Tensor> residuals;
  int64_t length = 0;
  int64_t place = -begin;
  for (const auto& entry : entries) {
    const int64_t end = place + entry.gradient.numel();
    const Piece own{std::max<int64_t>(place, 0), std::min(end, differences.numel())};
    place = end;
    const Piece groups = groupsOf(own, codes.layout().groupElements, most, encoding.key);
    if (own.end - own.begin < kFewest || groups.end <= groups.begin) continue;
    samples.push_back(elementsOf(differences, groups));
    if (encoding.hasFeedback()) residuals.push_back(elementsOf(encoding.residual, groups));
    seen_.push_back({entry.parameter, {length, length + groups.end - groups.begin}});
    length = seen_.back().within.end;
  }
  if (seen_.empty()) return;
  // They are coded without the others, whose groups have scales of their own.
  const at::Tensor chunk = at::cat(samples);
  const Encoding alone{.rounding = encoding.rounding, .key = encoding.key};
  const at::Tensor received = decodedPart(codes, chunk, {0, length}, alone);
  numbers_ = lossesOf(chunk, received, residuals.empty() ? at::Tensor() : at::cat(residuals));
}

std::vector<CodingLook::Seen> CodingLook::seenIn(const BucketEntries& entries, size_t perPart) const {
  std::vector<Seen> seen;
  int64_t begin = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    const int64_t end = begin + entries[i].gradient.numel();
    const Piece within{std::max(begin, sample_.begin) - sample_.begin, std::min(end, sample_.end) - sample_.begin};
    begin = end;
    if (within.begin < within.end) seen.push_back({entries[i % perPart].parameter, within});
  }
  return seen;
}

void CodingLook::chooseExact(int64_t elements) {
  Piece longest;
  for (const auto& [parameter, within] : seen_) {
    const Piece first{within.begin, std::min(within.end, elements)};
    if (first.end - first.begin <= longest.end - longest.begin) continue;
    longest = first;
    exactParameter_ = parameter;
  }
  if (longest.end - longest.begin < kFewestExact) longest = {};
  exact_ = {sample_.begin + longest.begin, sample_.begin + longest.end};
}

at::Tensor CodingLook::lossesOf(const at::Tensor& sample, const at::Tensor& decoded, const at::Tensor& residual) const {
  const at::Tensor errors = sample - decoded;
  std::vector<at::Tensor> losses;
  for (const auto& [parameter, within] : seen_) {
    const at::Tensor values = elementsOf(sample, within);
    const at::Tensor factor = (kLargestNumber / values.abs().amax()).clamp_max(1);
    const at::Tensor own = values * factor;
    losses.push_back(squared(elementsOf(errors, within) * factor));
    losses.push_back(squaredWithoutOutliers(own));
    losses.push_back(residual.defined() ? squared(elementsOf(residual, within).to(own.scalar_type()) * factor)
                                        : at::zeros_like(losses.back()));
    losses.push_back(squared(own));
  }
  return at::stack(losses).clamp_max_(kLargestSum).to(at::kFloat);
}

void CodingLook::tell(Guard& guard, int64_t step) const {
  if (!seen_.empty()) tell(guard, step, numbers_, numbers_, kNoLimit);
}

void CodingLook::tell(Guard& guard, int64_t step, const at::Tensor& flat, const at::Tensor& numbers) const {
  tell(guard, step, flat, numbers, kSoundResidual);
}

void CodingLook::tell(Guard& guard, int64_t step, const at::Tensor& flat, const at::Tensor& numbers,
                      double soundResidual) const {
  // Behind the exact elements come the same ones of the mean that was coded. The type of gradients rounds both alike:
  // what a half cannot hold is no loss of the codec.
  const int64_t count = exact_.end - exact_.begin;
  const int64_t rows = numbers.numel() - count;
  const at::Tensor exact = numbers.narrow(0, rows, count).to(flat.scalar_type());
  const at::Tensor told =
      at::cat({numbers.narrow(0, 0, rows), exact.to(at::kFloat), elementsOf(flat, exact_).to(at::kFloat)});
  guard.note(step, told,
             [codec = codec_, limit = soundLoss_, soundResidual, seen = seen_, ofMean = exactParameter_,
              count](const float* number) {
               const std::string finer = finerThan(codec, 1).empty() ? "float32" : finerThan(codec, 1);
               std::vector<Guard::Reading> readings;
               for (const auto& [parameter, within] : seen) {
                 readings.push_back({parameter, Guard::Measure::kCoding, number[0] / number[1], limit, codec, finer});
                 readings.push_back(
                     {parameter, Guard::Measure::kResidual, number[2] / number[3], soundResidual, codec, finer});
                 number += kColumns;
               }
               const double norm = squaredNorm(number, count);
               if (norm < static_cast<double>(count) * kLeastSquare) return readings;
               const double far = squaredDistance(number + count, number, count) / norm;
               readings.push_back({ofMean, Guard::Measure::kMean, far, kErrorsOfMean * limit, codec, finer});
               return readings;
             });
}

}  // namespace bagua::compressed
