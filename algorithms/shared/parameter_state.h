// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "algorithms/bucket.h"
#include "algorithms/state.h"
#include "kernels/codec.h"

namespace bagua {

// What an algorithm remembers of each parameter between steps: float32 numbers, one for every element of its gradient
// (in the gradient's memory order) or for some of them, zero at first. Residuals of error feedback, for example.
//
// A bucket's program sees them as one flat tensor in the bucket's order. Buckets come and go, values stay with their
// parameters. Any thread may call; buckets that are at work at once have no parameter in common.
class ParameterState {
 public:
  // `name`: of the tensors in a checkpoint.
  explicit ParameterState(std::string name) : name_(std::move(name)) {}

  // The state of all elements of a bucket, or of those in `pieces` (ascending, of the bucket's flat tensor) one piece
  // after another. Writing to it changes the state. The same memory as long as the same is asked for.
  //
  // Where the bucket's parameters had other elements before, values whose elements are asked for again stay; the others
  // are orphans, until takeOrphans() or a call that asks for their elements.
  at::Tensor flatFor(const Bucket& bucket);
  at::Tensor flatFor(const Bucket& bucket, const std::vector<Piece>& pieces);

  // Values of elements [begin, begin + values.numel()) of the bucket's flat tensor.
  struct Orphan {
    int64_t begin = 0;
    at::Tensor values;
  };
  // What the bucket's parameters lost when their elements changed: to be kept elsewhere, or it is gone.
  std::vector<Orphan> takeOrphans(const Bucket& bucket);
  // Drops all values of these parameters; what a device may still read goes to `retained`.
  void forget(const std::vector<int64_t>& positions, Bucket::Retained& retained);

  // Multiplies all values, which stay finite.
  void rescale(double factor);

  [[nodiscard]] const std::string& name() const { return name_; }

  [[nodiscard]] int64_t bytes() const;

  // By parameter: "<name>.<position>"; where not all elements have values, the pieces that have in
  // "<name>.<position>.pieces". Copies. Orphans are not in it.
  [[nodiscard]] AlgorithmState state() const;
  // Whether load() would take this entry of `state`, or the pieces of another, by its name.
  [[nodiscard]] bool takes(const std::string& entry, const AlgorithmState& state) const;
  // Replaces all. Of other names in `state` it takes no notice, see takes(). Throws ValueError for what state() did not
  // make, or what does not fit `parameters`, where there are any.
  void load(const AlgorithmState& state, const std::vector<at::Tensor>& parameters);

 private:
  // Values of elements [begin, begin + values.numel()) of one parameter; views of the flat tensors.
  struct Part {
    int64_t begin = 0;
    at::Tensor values;

    [[nodiscard]] int64_t end() const { return begin + values.numel(); }
  };
  struct Held {
    // Elements of the parameter; -1 where only a checkpoint has told of it, and that not of all of them.
    int64_t numel = -1;
    std::vector<Part> parts;
    std::vector<Part> orphans;
  };
  // What was asked for, and the tensor that was given.
  struct Layout {
    std::vector<int64_t> positions;
    std::vector<Piece> pieces;
    at::Tensor flat;
  };

  at::Tensor pack(const Bucket& bucket, const std::vector<Piece>& pieces);
  void dropLayoutsOf(const std::vector<int64_t>& positions);
  static void move(Held& held, const std::vector<Part>& wanted);

  const std::string name_;
  mutable std::mutex mutex_;
  std::map<int64_t, Held> held_;
  std::vector<Layout> layouts_;
};

// Replaces numbers that no float32 holds by the largest one: an infinity among residuals would make every later step
// infinite.
void keepFinite(const at::Tensor& residuals);

}  // namespace bagua
