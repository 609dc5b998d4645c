// SPDX-License-Identifier: Apache-2.0
// Sparse tensors of peers: any number of entries, any indices and values. The sum is refused with an exception, or all
// its indices lie within the tensor.
#include <ATen/ops/_validate_sparse_coo_tensor_args.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "backend/operation/sparse_reduction.h"
#include "tests/fuzz/fuzzed_bytes.h"
#include "tests/fuzz/lone_rank.h"

namespace bagua {
namespace {

using fuzz::FuzzedBytes;

at::ScalarType dtypeOf(FuzzedBytes& input) {
  constexpr std::array kTypes = {at::kFloat, at::kDouble, at::kHalf, at::kLong, at::kComplexFloat};
  return kTypes.at(input.take<uint8_t>() % kTypes.size());
}

// Also without entries, without room for any, and with several in one place.
at::Tensor ownTensor(FuzzedBytes& input) {
  std::vector<int64_t> sizes;
  const int64_t sparseDimensions = input.from(1, 3);
  for (int64_t dimension = 0; dimension < sparseDimensions; ++dimension) sizes.push_back(input.from(0, 12));
  const bool hasRoom = std::find(sizes.begin(), sizes.end(), 0) == sizes.end();
  const int64_t count = hasRoom ? input.from(0, 6) : 0;
  std::vector<int64_t> rowShape{count};
  for (int64_t dense = input.from(0, 2); dense > 0; --dense) {
    sizes.push_back(input.from(0, 4));
    rowShape.push_back(sizes.back());
  }
  const at::Tensor indices = at::zeros({sparseDimensions, count}, at::kLong);
  for (int64_t i = 0; i < indices.numel(); ++i) {
    indices.mutable_data_ptr<int64_t>()[i] = input.from(0, sizes[i / count] - 1);
  }
  const at::Tensor values = at::zeros(rowShape, at::TensorOptions().dtype(dtypeOf(input)));
  if (values.numel() > 0) input.fill(values.mutable_data_ptr(), values.nbytes());
  return at::sparse_coo_tensor(indices, values, sizes);
}

// Leaves what the peers say as this rank says it, but for some words, or makes up all of it.
void madeUp(FuzzedBytes& input, void* bytes, size_t count) {
  if (input.take<uint8_t>() % 8 == 0) return input.fill(bytes, count);
  const auto words = static_cast<int64_t>(count / sizeof(int64_t));
  for (int64_t changes = input.from(0, 4); changes > 0 && words > 0; --changes) {
    const int64_t value = input.coin() ? input.from(-1, 12) : input.claim();
    std::memcpy(static_cast<int64_t*>(bytes) + input.from(0, words - 1), &value, sizeof(value));
  }
}

}  // namespace

void fuzzSparseReduction(FuzzedBytes& input) {
  at::Tensor tensor = ownTensor(input);
  const auto sizes = tensor.sizes().vec();
  const auto ranks = static_cast<int>(input.from(1, 4));
  const bool average = input.coin();
  fuzz::LoneRank rank(ranks, {}, [&input](void* bytes, size_t count) { madeUp(input, bytes, count); });
  try {
    allReduceSparse(rank.communicator(), tensor, average);
  } catch (const c10::ValueError&) {
    // A peer cannot be believed.
    return;
  }
  TORCH_INTERNAL_ASSERT(tensor.sizes() == sizes, "a peer has changed the shape");
  // Throws another error where an index lies outside.
  at::_validate_sparse_coo_tensor_args(tensor._indices(), tensor._values(), sizes, tensor.is_coalesced());
}

}  // namespace bagua

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer calls it so
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  bagua::fuzz::FuzzedBytes input(data, size);
  bagua::fuzzSparseReduction(input);
  return 0;
}
