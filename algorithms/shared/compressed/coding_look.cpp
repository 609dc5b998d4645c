// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/coding_look.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <utility>

#include "algorithms/shared/compressed/ladder.h"
#include "algorithms/shared/compressed/slots.h"
#include "backend/os/scratch_memory.h"
#include "kernels/device_ways.h"

namespace bagua::compressed {
namespace {

// Elements of a sample: what a cache holds.
constexpr int64_t kSample = 1 << 16;
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
// Error feedback holds back less than this many squared norms of a gradient as long as it brings back what it holds.
constexpr double kSoundResidual = 4;
// Errors of several codings, and of the step before, add up in a mean.
constexpr double kErrorsOfMean = 4;

// The chunk of a message that the key draws; its last bits have drawn the bucket.
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
    : codec_(std::move(codec)),
      soundLoss_(soundLossOf(codec_) * (coding.sender.rounding == Rounding::kStochastic ? kStochastic : 1)) {
  const CodedLanes coded(options, flat.numel(), communicator);
  const Piece chunk = chunkToLookAt(coded.lanes, key);
  const auto layout = coding.codec->layout();
  const Piece whole{0, chunk.end - chunk.begin};
  // A device takes chunks whole.
  const Piece part = worksOnCpu(flat) ? placeOfSample(chunk, layout.groupElements, key) : whole;
  sample_ = {chunk.begin + part.begin, chunk.begin + part.end};
  const at::Tensor values = elementsOf(flat, chunk);
  at::Tensor packed = scratchTensor({layout.packedBytes(values.numel())}, flat.options().dtype(at::kByte));
  const Encoding encoding{.rounding = coding.sender.rounding, .key = coding.sender.key};
  coding.codec->start(values, encoding, packed);
  coding.codec->encode(values, part, encoding, packed);
  const auto type = flat.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor decoded = at::zeros({part.end - part.begin}, flat.options().dtype(type));
  coding.codec->decodeAdd(packed, part, flat.scalar_type(), decoded);
  const at::Tensor sample = elementsOf(flat, sample_).to(type);
  // Residuals of the lanes of a host are those of another tensor.
  const bool hasResidual = coding.sender.hasFeedback() && coded.lanes.count() == 1;
  const at::Tensor residual = hasResidual ? elementsOf(coding.sender.residual, sample_).to(type) : at::Tensor();
  seen_ = seenIn(entries, options.isToParts ? entries.size() / communicator.size() : entries.size());
  if (!options.isToParts) chooseExact(std::clamp(flat.numel() / kCodedOfExact, kFewestExact, kMostExact));
  numbers_ = at::cat({lossesOf(sample, decoded, residual).to(at::kFloat), elementsOf(flat, exact_).to(at::kFloat)});
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

at::Tensor CodingLook::lossesOf(const at::Tensor& values, const at::Tensor& decoded, const at::Tensor& residual) const {
  const at::Tensor errors = values - decoded;
  std::vector<at::Tensor> losses;
  for (const auto& [parameter, within] : seen_) {
    const at::Tensor own = elementsOf(values, within);
    losses.push_back(squared(elementsOf(errors, within)));
    losses.push_back(squaredWithoutOutliers(own));
    losses.push_back(residual.defined() ? squared(elementsOf(residual, within)) : at::zeros_like(losses.back()));
    losses.push_back(squared(own));
  }
  return at::stack(losses);
}

void CodingLook::tell(Guard& guard, int64_t step, const at::Tensor& flat, const at::Tensor& numbers) const {
  // Behind the exact elements come the same ones of the mean that was coded.
  const at::Tensor told = at::cat({numbers, elementsOf(flat, exact_).to(at::kFloat)});
  guard.note(step, told,
             [codec = codec_, limit = soundLoss_, seen = seen_, ofMean = exactParameter_,
              count = exact_.end - exact_.begin](const float* number) {
               const std::string finer = finerThan(codec, 1).empty() ? "float32" : finerThan(codec, 1);
               std::vector<Guard::Reading> readings;
               for (const auto& [parameter, within] : seen) {
                 readings.push_back({parameter, Guard::Measure::kCoding, number[0] / number[1], limit, codec, finer});
                 readings.push_back(
                     {parameter, Guard::Measure::kResidual, number[2] / number[3], kSoundResidual, codec, finer});
                 number += kColumns;
               }
               const double far = squaredDistance(number + count, number, count) / squaredNorm(number, count);
               readings.push_back({ofMean, Guard::Measure::kMean, far, kErrorsOfMean * limit, codec, finer});
               return readings;
             });
}

}  // namespace bagua::compressed
