// SPDX-License-Identifier: Apache-2.0
#include "algorithms/state.h"

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <limits>

namespace bagua {
namespace {

const at::Tensor& entryOf(const AlgorithmState& state, const std::string& name) {
  const auto entry = state.find(name);
  TORCH_CHECK_VALUE(entry != state.end(), "bagua: the checkpoint lacks '", name, "' of the algorithm's state");
  return entry->second;
}

}  // namespace

at::Tensor counterTensor(int64_t value) { return at::full({}, value, at::kLong); }

int64_t counterOf(const AlgorithmState& state, const std::string& name) {
  const at::Tensor& entry = entryOf(state, name);
  TORCH_CHECK_VALUE(entry.numel() == 1 && entry.scalar_type() == at::kLong, "bagua: '", name,
                    "' of the checkpoint must be a number, got ", entry.scalar_type(), entry.sizes());
  const auto value = entry.item<int64_t>();
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 2;
  TORCH_CHECK_VALUE(0 <= value && value <= kMost, "bagua: '", name, "' of the checkpoint must be from 0 to ", kMost,
                    ", got ", value);
  return value;
}

at::Tensor tensorOf(const AlgorithmState& state, const std::string& name, const at::Tensor& like) {
  const at::Tensor& found = entryOf(state, name);
  TORCH_CHECK_VALUE(found.sizes() == like.sizes() && found.scalar_type() == like.scalar_type(), "bagua: '", name,
                    "' of the checkpoint is ", found.scalar_type(), found.sizes(), ", this model needs ",
                    like.scalar_type(), like.sizes());
  return found.to(like.device()).clone();
}

void checkThatAllAreTaken(const AlgorithmState& state, const std::function<bool(const std::string& name)>& isTaken) {
  for (const auto& [name, value] : state) {
    TORCH_CHECK_VALUE(isTaken(name), "bagua: '", name, "' of the checkpoint is no state of this algorithm");
  }
}

}  // namespace bagua
