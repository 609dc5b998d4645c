// SPDX-License-Identifier: Apache-2.0
#include "backend/os/process_mark.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <atomic>

namespace bagua {
namespace {

std::atomic<uint64_t> forkCount{0};

}  // namespace

uint64_t ProcessMark::forks() {
  static const int error = ::pthread_atfork(nullptr, nullptr, [] { forkCount.fetch_add(1); });
  TORCH_CHECK(error == 0, "bagua: cannot ask to be told of forks, error ", error);
  return forkCount.load(std::memory_order_relaxed);
}

}  // namespace bagua
