// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

// What a transport may find out about its peers. All of them reach Python as DistNetworkError would.
namespace bagua {

// A peer has ended, seen for certain: the kernel says so, or another process has its address.
class PeerDiedError final : public c10::DistNetworkError {
 public:
  using DistNetworkError::DistNetworkError;
};

// A peer has left the exchange, in most cases because it has failed itself: not the cause of anything.
class PeerLeftError final : public c10::DistNetworkError {
 public:
  using DistNetworkError::DistNetworkError;
};

// The ranks have come together in different programs.
class MismatchError final : public c10::DistNetworkError {
 public:
  using DistNetworkError::DistNetworkError;
};

// A rank has refused its own arguments in the place of an exchange, and every rank has heard of it before anything was
// exchanged: the ranks are in step, and the group goes on.
class RefusedError final : public c10::DistBackendError {
 public:
  using DistBackendError::DistBackendError;
};

// In the place of the number of elements that a rank sends to each: it has refused its arguments.
inline constexpr int64_t kRefused = -1;

// Whether an error may be the consequence of what went wrong on another rank, so that its own text is no more than a
// symptom: a connection that ends, a peer that has left. Other errors tell their cause themselves.
bool isSymptom(const std::exception_ptr& error);

// Returns whether an error says that a peer has ended.
bool isDeath(const std::exception_ptr& error);

template <typename Error, typename... Parts>
[[noreturn]] void throwError(c10::SourceLocation where, const Parts&... parts) {
  throw Error(where, c10::str(parts...));
}

// On every rank, when rank `refusing` has refused its arguments.
[[noreturn]] inline void throwRefused(int refusing) {
  throwError<RefusedError>({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, "rank ", refusing,
                           " has refused its own arguments, and has raised an error that says why. Nothing was "
                           "exchanged");
}

}  // namespace bagua

#define BAGUA_THROW(Error, ...) \
  ::bagua::throwError<Error>({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, __VA_ARGS__)
