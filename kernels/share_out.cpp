// SPDX-License-Identifier: Apache-2.0
#include "kernels/share_out.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace bagua {
namespace {

thread_local bool staysOnThread = false;

}  // namespace

StayOnThread::StayOnThread() : before_(std::exchange(staysOnThread, true)) {}
StayOnThread::~StayOnThread() { staysOnThread = before_; }

void shareOut(int64_t count, int64_t grain, c10::function_ref<void(int64_t begin, int64_t end)> part) {
  if (count <= 0) return;
  const bool isAlone = staysOnThread || at::in_parallel_region();
  const int64_t parts = isAlone ? 1 : std::min<int64_t>(at::get_num_threads(), (count + grain - 1) / grain);
  if (parts <= 1) {
    part(0, count);
    return;
  }
  const int64_t length = (count + parts - 1) / parts;
  // A loop of libtorch's over the numbers of the parts, which it shares out one by one.
  std::vector<int64_t> numbers(parts);
  std::iota(numbers.begin(), numbers.end(), int64_t{0});
  const at::Tensor tensor = at::from_blob(numbers.data(), {parts}, at::kLong);
  auto loop = at::TensorIteratorConfig().add_output(tensor).resize_outputs(false).check_all_same_dtype(false).build();
  loop.for_each(
      [&](char** data, const int64_t* strides, int64_t size, int64_t rows) {
        // One dimension has one row.
        for (int64_t i = 0; i < size * rows; ++i) {
          const int64_t begin = *reinterpret_cast<const int64_t*>(data[0] + i * strides[0]) * length;
          if (begin < count) part(begin, std::min(begin + length, count));
        }
      },
      1);
}

}  // namespace bagua
