// SPDX-License-Identifier: Apache-2.0
// What peers say when a hook is registered: any bytes. Registration succeeds or raises ValueError.
#include <c10/util/Exception.h>

#include "algorithms/hook/agreement.h"
#include "tests/fuzz/fuzzed_bytes.h"
#include "tests/fuzz/lone_rank.h"

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer calls it so
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using bagua::fuzz::FuzzedBytes;
  FuzzedBytes input(data, size);
  const bagua::Registration own{.text = input.text(255), .detail = input.text(32)};
  const int ranks = static_cast<int>(input.from(1, 8));
  bagua::fuzz::LoneRank executors(ranks, {}, [&input](void* bytes, size_t count) { input.fill(bytes, count); });
  try {
    bagua::agreeOn(own, bagua::kOfRegistration, executors, at::kCPU);
  } catch (const c10::ValueError&) {
    // The ranks do not agree.
    return 0;
  }
  return 0;
}
