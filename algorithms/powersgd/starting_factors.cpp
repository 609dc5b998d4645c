// SPDX-License-Identifier: Apache-2.0
#include "algorithms/powersgd/starting_factors.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>

#include <charconv>
#include <string>

#include "kernels/device_ways.h"

namespace bagua::powersgd {
namespace {

constexpr const char* kName = "q.";

// "q.<number>" -> the number; -1 for other texts.
int64_t positionIn(const std::string& text) {
  const std::string prefix = kName;
  if (!text.starts_with(prefix)) return -1;
  int64_t number = -1;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data() + prefix.size(), end, number);
  return error == std::errc() && stop == end ? number : -1;
}

// What the host has drawn or loaded, where `options` say. The host does not wait until it is there: only from pinned
// memory, and of the type that it will have, does CUDA copy without it. torch keeps that memory until the copy is over.
// No program that is captured into a graph may do so: replays would read what the memory holds then.
at::Tensor copyTo(const at::Tensor& values, const at::TensorOptions& options) {
  if (worksOnCpu(options.device())) return values.to(options);
  const auto pinned = at::TensorOptions().dtype(options.dtype()).pinned_memory(options.device().is_cuda());
  const at::Tensor staged = at::empty(values.sizes(), pinned).copy_(values);
  return at::empty(values.sizes(), options).copy_(staged, /*non_blocking=*/true);
}

// What a step has kept is there already, what a checkpoint held need not be.
at::Tensor keptAs(const at::Tensor& kept, const at::TensorOptions& options) {
  if (kept.device() != options.device()) return copyTo(kept, options);
  return kept.to(c10::typeMetaToScalarType(options.dtype()));
}

}  // namespace

// As the README says, for those who want to draw the same.
at::Tensor StartingFactors::drawn(int64_t parameter, const Shape& shape, int64_t step,
                                  const at::TensorOptions& options) const {
  constexpr uint64_t kSpread = 1'000'003;
  const uint64_t key = (static_cast<uint64_t>(seed_) * kSpread + static_cast<uint64_t>(step)) * kSpread +
                       static_cast<uint64_t>(parameter);
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(key);
  const at::Tensor columns = at::randn({shape.columns, shape.rank}, generator, at::TensorOptions().dtype(at::kFloat));
  return copyTo(columns.t().contiguous(), options);
}

at::Tensor StartingFactors::startOf(const MatrixGroup& group, int64_t step, const at::TensorOptions& options) {
  std::vector<at::Tensor> starts;
  if (!isWarm_) {
    for (const auto& matrix : group.matrices) starts.push_back(drawn(matrix.parameter, group.shape, step, options));
    return at::stack(starts);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<at::Tensor> spares;
  for (const auto& matrix : group.matrices) {
    at::Tensor& spare = spare_[matrix.parameter];
    if (!spare.defined()) spare = drawn(matrix.parameter, group.shape, 0, options);
    spares.push_back(spare);
    const auto kept = kept_.find(matrix.parameter);
    starts.push_back(kept == kept_.end() ? spare : keptAs(kept->second, options));
  }
  const at::Tensor start = at::stack(starts);
  const at::Tensor isZero = start.abs().amax(-1, true) == 0;
  return at::where(isZero, at::stack(spares), start);
}

void StartingFactors::keep(const MatrixGroup& group, const at::Tensor& q, Bucket::Retained& retained) {
  if (!isWarm_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < group.matrices.size(); ++i) {
    at::Tensor& kept = kept_[group.matrices[i].parameter];
    if (kept.defined() && !worksOnCpu(kept)) retained.push_back(kept);
    kept = q.select(0, static_cast<int64_t>(i));
  }
}

void StartingFactors::forget(const std::vector<int64_t>& parameters, Bucket::Retained& retained) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const int64_t parameter : parameters) {
    const auto kept = kept_.find(parameter);
    if (kept == kept_.end()) continue;
    if (!worksOnCpu(kept->second)) retained.push_back(kept->second);
    kept_.erase(kept);
  }
}

bool StartingFactors::isName(const std::string& name) { return positionIn(name) >= 0; }

int64_t StartingFactors::bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t bytes = 0;
  for (const auto& [parameter, q] : kept_) bytes += static_cast<int64_t>(q.nbytes());
  return bytes;
}

AlgorithmState StartingFactors::state() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  AlgorithmState state;
  for (const auto& [parameter, q] : kept_) state.emplace(kName + std::to_string(parameter), q.clone());
  return state;
}

void StartingFactors::load(const AlgorithmState& state, const std::vector<at::Tensor>& parameters, const Worth& worth) {
  std::map<int64_t, at::Tensor> loaded;
  for (const auto& [name, q] : state) {
    const int64_t parameter = positionIn(name);
    if (parameter < 0) continue;
    TORCH_CHECK_VALUE(q.dim() == 2 && (q.scalar_type() == at::kFloat || q.scalar_type() == at::kDouble), "bagua: '",
                      name, "' of the checkpoint is no factor: ", q.scalar_type(), " ", q.sizes());
    if (!parameters.empty()) {
      TORCH_CHECK_VALUE(parameter < static_cast<int64_t>(parameters.size()), "bagua: the checkpoint has '", name,
                        "', this model has ", parameters.size(), " trainable parameters");
      const auto shape = matrixOf(parameters[parameter], worth);
      TORCH_CHECK_VALUE(shape && q.size(0) == shape->rank && q.size(1) == shape->columns, "bagua: '", name,
                        "' of the checkpoint is ", q.sizes(), ", parameter ", parameter, " of this model is ",
                        parameters[parameter].sizes());
    }
    loaded.emplace(parameter, q.clone());
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  kept_ = std::move(loaded);
}

}  // namespace bagua::powersgd
