// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/shared_memory/streaming_copy.h"

#include <algorithm>
#include <cstring>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace bagua {

#if defined(__x86_64__)

namespace {

constexpr int64_t kLineBytes = 64;

}  // namespace

void streamingCopy(uint8_t* to, const uint8_t* from, int64_t bytes) {
  const auto misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % kLineBytes);
  const int64_t head = misaligned == 0 ? 0 : std::min(bytes, kLineBytes - misaligned);
  std::memcpy(to, from, head);
  int64_t done = head;
  for (; done + kLineBytes <= bytes; done += kLineBytes) {
    const auto* const source = reinterpret_cast<const __m128i*>(from + done);
    auto* const target = reinterpret_cast<__m128i*>(to + done);
    const __m128i first = _mm_loadu_si128(source);
    const __m128i second = _mm_loadu_si128(source + 1);
    const __m128i third = _mm_loadu_si128(source + 2);
    const __m128i fourth = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, first);
    _mm_stream_si128(target + 1, second);
    _mm_stream_si128(target + 2, third);
    _mm_stream_si128(target + 3, fourth);
  }
  std::memcpy(to + done, from + done, bytes - done);
  // Streaming stores are not ordered with the ones that follow.
  _mm_sfence();
}

#else

void streamingCopy(uint8_t* to, const uint8_t* from, int64_t bytes) { std::memcpy(to, from, bytes); }

#endif

}  // namespace bagua
