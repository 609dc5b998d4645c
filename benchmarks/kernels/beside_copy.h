// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <vector>

// A kernel on the CPU beside a plain copy of the same tensor, timed in turns in one run.
namespace bagua {

template <class F>
double secondsOf(int64_t repeats, const F& f) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  for (int64_t i = 0; i < repeats; ++i) f();
  return std::chrono::duration<double>(Clock::now() - start).count() / static_cast<double>(repeats);
}

inline double median(std::vector<double>& seconds) {
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
}

struct BesideCopy {
  double seconds;
  double copySeconds;
};

// Medians of batches: other work on the machine disturbs a few of them. All speeds count the bytes of the tensor, not
// of its packed form. `limit_ratio` is speed over the copy's speed.
template <class F>
BesideCopy besideCopy(benchmark::State& state, const at::Tensor& source, at::Tensor& destination, const F& f) {
  const auto bytes = static_cast<double>(source.nbytes());
  const auto repeats = std::max<int64_t>(1, static_cast<int64_t>(4e6 / bytes));
  std::vector<double> copies;
  std::vector<double> mine;
  for (auto _ : state) {
    copies.push_back(secondsOf(repeats, [&] { destination.copy_(source); }));
    mine.push_back(secondsOf(repeats, f));
    state.SetIterationTime(mine.back());
  }
  const double copySeconds = median(copies);
  const double seconds = median(mine);
  state.counters["GB/s"] = bytes / seconds / 1e9;
  state.counters["copy_GB/s"] = bytes / copySeconds / 1e9;
  state.counters["limit_ratio"] = copySeconds / seconds;
  return {seconds, copySeconds};
}

}  // namespace bagua
