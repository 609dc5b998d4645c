// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/run_together.h"

#include <c10/util/Logging.h>

#include <exception>
#include <future>
#include <system_error>
#include <utility>

#include "backend/operation/operation.h"

namespace bagua {
namespace {

void keepFirst(std::exception_ptr& failure, const std::function<void()>& call) {
  try {
    call();
  } catch (...) {
    if (!failure) failure = std::current_exception();
  }
}

}  // namespace

std::function<void()> inOwnThread(std::function<void()> prepareThread, std::function<void()> call) {
  return [prepareThread = std::move(prepareThread), call = std::move(call)] {
    try {
      prepareThread();
    } catch (...) {
      LOG(WARNING) << "bagua: a thread could not be prepared: " << messageOf(std::current_exception());
    }
    call();
  };
}

void runTogether(const std::function<void()>& prepareThread, const std::vector<std::function<void()>>& calls) {
  std::vector<std::future<void>> others;
  std::vector<std::function<void()>> here;
  for (const auto& call : calls) {
    try {
      others.push_back(std::async(std::launch::async, inOwnThread(prepareThread, call)));
    } catch (const std::system_error&) {
      here.push_back(call);
    }
  }
  std::exception_ptr failure;
  for (const auto& call : here) keepFirst(failure, call);
  for (auto& other : others) keepFirst(failure, [&other] { other.get(); });
  if (failure) std::rethrow_exception(failure);
}

}  // namespace bagua
