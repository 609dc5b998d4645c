// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <chrono>
#include <map>
#include <string>

namespace bagua {

// Seconds that the thread running the programs spent in each stage. On CUDA that is the time to enqueue it.
using StageSeconds = std::map<std::string, double>;

// The gradients that travel together: a flat tensor, reduced in place.
struct Bucket {
  at::Tensor flat;
  StageSeconds seconds = {};
};

// Times one stage of a bucket for as long as it lives. A profiler that records all threads shows it by its name, which
// is a literal.
class Stage {
 public:
  Stage(Bucket& bucket, const char* name)
      : bucket_(bucket), name_(name), record_(at::RecordScope::USER_SCOPE), begin_(std::chrono::steady_clock::now()) {
    if (record_.isActive()) record_.before(name_);
  }
  ~Stage() {
    bucket_.seconds[name_] += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

 private:
  Bucket& bucket_;
  const char* name_;
  at::RecordFunction record_;
  const std::chrono::steady_clock::time_point begin_;
};

}  // namespace bagua
