// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

namespace bagua {

// The number of torch's intra-op threads while it lives.
class IntraOpThreads {
 public:
  explicit IntraOpThreads(int count) : before_(at::get_num_threads()) { at::set_num_threads(count); }
  ~IntraOpThreads() { at::set_num_threads(before_); }
  IntraOpThreads(const IntraOpThreads&) = delete;
  IntraOpThreads& operator=(const IntraOpThreads&) = delete;

 private:
  const int before_;
};

}  // namespace bagua

// ThreadSanitizer does not see how the threads of OpenMP, which is not compiled for it, wait for each other.
#if defined(__SANITIZE_THREAD__)
#define BAGUA_NEEDS_INTRA_OP_THREADS() GTEST_SKIP() << "ThreadSanitizer cannot follow OpenMP's threads"
#else
#define BAGUA_NEEDS_INTRA_OP_THREADS() static_assert(true)
#endif
