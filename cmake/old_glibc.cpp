// SPDX-License-Identifier: Apache-2.0
// GCC's headers ask for these functions, which neither the libraries that scripts/sysroot.sh unpacks nor glibc 2.28
// have all. Each library of ours gets its own, hidden.
#include <dlfcn.h>
#include <pthread.h>

#include <cstdint>
#include <ctime>
#include <new>

#define BAGUA_HIDDEN __attribute__((visibility("hidden")))

namespace {

using ClockWait = int(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);

constexpr int64_t kNanosecondsPerSecond = 1'000'000'000;
// A century: sums of two do not overflow.
constexpr int64_t kForEver = 100L * 365 * 24 * 3600;

int64_t nanoseconds(const timespec& time) { return time.tv_sec * kNanosecondsPerSecond + time.tv_nsec; }

int64_t nanosecondsOf(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return nanoseconds(now);
}

}  // namespace

// The look-up finds glibc's own, which it has from 2.30 on. Without it a wait follows the clock of the wall, as
// libstdc++ does where it was built on an older glibc: its callers ask their own clock again when it ends.
extern "C" BAGUA_HIDDEN int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                                   const timespec* deadline) {
  static auto* const kOfGlibc = reinterpret_cast<ClockWait*>(dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"));
  if (kOfGlibc != nullptr) return kOfGlibc(condition, mutex, clock, deadline);
  const timespec possible{.tv_sec = deadline->tv_sec < kForEver ? deadline->tv_sec : kForEver,
                          .tv_nsec = deadline->tv_nsec};
  const int64_t end = nanosecondsOf(CLOCK_REALTIME) + nanoseconds(possible) - nanosecondsOf(clock);
  const timespec onTheWall{.tv_sec = end / kNanosecondsPerSecond, .tv_nsec = end % kNanosecondsPerSecond};
  return pthread_cond_timedwait(condition, mutex, &onTheWall);
}

// libstdc++ has this one from GCC 11 on.
namespace std {
BAGUA_HIDDEN void __throw_bad_array_new_length() { throw bad_array_new_length(); }  // NOLINT(cert-dcl58-cpp)
}  // namespace std
