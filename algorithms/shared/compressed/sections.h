// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "algorithms/bucket.h"
#include "kernels/codec.h"

namespace bagua::compressed {

// Gradients of a bucket that one codec takes, or that stay exact (no codec).
struct CodecSection {
  std::string codec;
  at::Tensor flat;
  BucketEntries entries;
  // Where the entries are in the bucket's flat tensor. Empty where the section is that tensor itself.
  std::vector<Piece> pieces;

  // What `flat` holds, back to the bucket.
  void scatterTo(const at::Tensor& whole) const;
  // Of a bucket in parts: what `own` holds of the section's part, back to the bucket's.
  void scatterPartTo(const at::Tensor& part, const at::Tensor& own) const;
};

using CodecOf = std::function<std::string(const BucketEntry& entry)>;

// The largest first. It is the bucket's own tensor, with zeros in the places of the others, where these are few: a
// copy of all would cost more than these on the line. Where the bucket holds several parts, one for each rank,
// all of them are cut alike: the first says how.
std::vector<CodecSection> sectionsOf(const Bucket& bucket, const CodecOf& codecOf, int parts = 1);

// Puts the parts of a bucket, one for each rank, in another order.
void arrangeParts(Bucket& bucket, const std::vector<int>& ranks);
// Parameters of the first part, and those at the same places of the others.
std::vector<int64_t> inAllParts(const std::vector<int64_t>& parameters, const BucketEntries& entries, int parts);

}  // namespace bagua::compressed
