// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "algorithms/bucket.h"
#include "algorithms/powersgd/matrices.h"
#include "algorithms/state.h"

namespace bagua::powersgd {

// The Q that each parameter's next step starts from: what the last step has found, or drawn at random. Any thread may
// call; buckets that are at work at once have no parameter in common.
class StartingFactors {
 public:
  StartingFactors(bool isWarm, int64_t seed) : isWarm_(isWarm), seed_(seed) {}

  // (matrices, rank, columns), the same on all ranks. A column of zeros, from which nothing could come any more, is
  // drawn anew.
  at::Tensor startOf(const MatrixGroup& group, int64_t step, const at::TensorOptions& options);
  // What the next step starts from. What it takes the place of goes to `retained`, see Bucket.
  void keep(const MatrixGroup& group, const at::Tensor& q, Bucket::Retained& retained);
  // These parameters start anew.
  void forget(const std::vector<int64_t>& parameters, Bucket::Retained& retained);

  [[nodiscard]] int64_t bytes() const;

  // By parameter: "q.<position>", (rank, columns).
  static bool isName(const std::string& name);
  [[nodiscard]] AlgorithmState state() const;
  // Replaces all. Of names that are not its own it takes no notice. Throws ValueError where they are none of matrices
  // that `parameters` have, if there are any.
  void load(const AlgorithmState& state, const std::vector<at::Tensor>& parameters, const Worth& worth);

 private:
  [[nodiscard]] at::Tensor drawn(int64_t parameter, const Shape& shape, int64_t step,
                                 const at::TensorOptions& options) const;

  const bool isWarm_;
  const int64_t seed_;
  mutable std::mutex mutex_;
  std::map<int64_t, at::Tensor> kept_;
  // What takes the place of columns of zeros.
  std::map<int64_t, at::Tensor> spare_;
};

}  // namespace bagua::powersgd
