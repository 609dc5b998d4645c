// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

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
};

using CodecOf = std::function<std::string(const BucketEntry& entry)>;

// The largest first. It is the bucket's own tensor, with zeros in the places of the others, unless these are many: a
// copy of all would cost more than a few zeros on the line.
std::vector<CodecSection> sectionsOf(const Bucket& bucket, const CodecOf& codecOf);

}  // namespace bagua::compressed
