// SPDX-License-Identifier: Apache-2.0
#include "algorithms/hook/bucket_splitting.h"

#include <c10/util/Exception.h>

#include <set>
#include <utility>

namespace bagua {
namespace {

// A derived class may reach these members of DDP's reducer, which offers no other way to reset them.
class OpenedReducer : public c10d::Reducer {
 public:
  static void forgetBackward(c10d::Reducer& reducer) {
    reducer.*(&OpenedReducer::expect_autograd_hooks_) = false;
    reducer.*(&OpenedReducer::require_finalize_) = false;
    at::Tensor& used = reducer.*(&OpenedReducer::local_used_map_);
    if (used.defined()) used.zero_();
    reducer.*(&OpenedReducer::local_used_map_reduced_) = false;
  }

  // DDP notes in this way which gradient came when; a backward before may have left some.
  static void noteGradients(c10d::Reducer& reducer) {
    (reducer.*(&OpenedReducer::rebuilt_params_)).clear();
    (reducer.*(&OpenedReducer::rebuilt_param_indices_)).clear();
    for (size_t index = (reducer.*(&OpenedReducer::params_)).size(); index-- > 0;) {
      (reducer.*(&OpenedReducer::push_rebuilt_params))(index);
    }
  }
};

}  // namespace

void splitBuckets(c10d::Reducer& reducer, c10d::Logger& logger, const std::vector<at::Tensor>& parameters,
                  int64_t mostBytes) {
  std::vector<std::vector<size_t>> buckets;
  size_t covered = 0;
  for (const auto& bucket : logger.get_per_bucket_variable_indices()) {
    buckets.emplace_back();
    int64_t bytes = 0;
    for (const size_t index : bucket) {
      TORCH_CHECK(index < parameters.size(), "bagua: DDP reduces parameter ", index, ", the hook was registered for ",
                  parameters.size(), ": register it again on a new DistributedDataParallel");
      const auto size = static_cast<int64_t>(parameters[index].nbytes());
      if (!buckets.back().empty() && bytes + size > mostBytes) {
        buckets.emplace_back();
        bytes = 0;
      }
      buckets.back().push_back(index);
      bytes += size;
      ++covered;
    }
  }
  TORCH_CHECK(covered == parameters.size(), "bagua: DDP reduces ", covered, " parameters, the hook was registered for ",
              parameters.size(), ": register it again on a new DistributedDataParallel");
  reducer.initialize_buckets(std::move(buckets));
}

void layOutBuckets(c10d::Reducer& reducer, const std::vector<std::vector<int64_t>>& layout, int64_t count) {
  std::vector<std::vector<size_t>> buckets;
  std::set<int64_t> held;
  for (const auto& bucket : layout) {
    buckets.emplace_back(bucket.begin(), bucket.end());
    for (const int64_t position : bucket) {
      TORCH_CHECK_VALUE(position >= 0 && position < count && held.insert(position).second,
                        "bagua: another rank has a bucket with parameter ", position, ", of which this model, with ",
                        count, " trainable parameters, has none or has had it before");
    }
  }
  TORCH_CHECK_VALUE(static_cast<int64_t>(held.size()) == count, "bagua: the buckets of another rank hold ", held.size(),
                    " parameters, this model has ", count, " trainable ones");
  reducer.initialize_buckets(std::move(buckets));
}

bool settleBuckets(c10d::Reducer& reducer) {
  if (!reducer.should_rebuild_buckets()) return false;
  OpenedReducer::noteGradients(reducer);
  return reducer.rebuild_buckets();
}

void forgetBackward(c10d::Reducer& reducer) { OpenedReducer::forgetBackward(reducer); }

}  // namespace bagua
