// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "backend/nccl_net/nccl_net_api.h"
#include "tests/support/wire_tests.h"

// Drives the plugin as NCCL does, with memory of the host: the library is loaded by its path, and everything goes
// through its table. tests/nccl_net does so between processes.
namespace bagua::nccl_net {

using namespace std::chrono_literals;
using net::Bytes;
using net::pattern;

inline std::mutex logMutex;
inline std::vector<std::string> warnings;

inline void log(LogLevel level, unsigned long, const char*, int, const char* format, ...) {
  if (level != LogLevel::kWarn) return;
  va_list arguments;
  va_start(arguments, format);
  std::array<char, 1024> line{};
  std::vsnprintf(line.data(), line.size(), format, arguments);
  va_end(arguments);
  const std::lock_guard<std::mutex> lock(logMutex);
  warnings.emplace_back(line.data());
}

inline std::string lastWarning() {
  const std::lock_guard<std::mutex> lock(logMutex);
  return warnings.empty() ? "" : warnings.back();
}

inline void* symbol(const char* name) {
  static void* const library = dlopen(BAGUA_TEST_PLUGIN, RTLD_NOW | RTLD_LOCAL);
  return library == nullptr ? nullptr : dlsym(library, name);
}

inline const NetV11& plugin() { return *static_cast<const NetV11*>(symbol("ncclNetPlugin_v11")); }
inline const Transfer& transfer() { return plugin().transfer; }

using Handle = std::array<char, kHandleBytes>;

// Two ends of a connection; and a communicator of NCCL's, for which they are made.
struct Ends {
  void* sending = nullptr;
  void* receiving = nullptr;
};

class NcclNet : public ::testing::Test {
 protected:
  void SetUp() override {
    setenv("BAGUA_SOCKET_IFNAME", "lo", 0);
    ASSERT_NE(symbol("ncclNetPlugin_v11"), nullptr) << dlerror();
    context_ = newContext();
    const std::lock_guard<std::mutex> lock(logMutex);
    warnings.clear();
  }
  void TearDown() override { EXPECT_EQ(plugin().finalize(context_), Result::kSuccess); }

  // As for a communicator that begins.
  static void* newContext() {
    void* context = nullptr;
    CommConfig config{.trafficClass = -1};
    EXPECT_EQ(plugin().init(&context, 1, &config, &log, nullptr), Result::kSuccess);
    return context;
  }

  Ends connect() { return connect(context_); }
  static Ends connect(void* context) {
    Ends ends;
    Handle handle{};
    void* const listening = listen(context, handle);
    for (const auto end = std::chrono::steady_clock::now() + 20s; !ends.sending || !ends.receiving;) {
      if (!ends.sending) {
        EXPECT_EQ(plugin().connect(context, 0, handle.data(), &ends.sending, nullptr), Result::kSuccess);
      }
      if (!ends.receiving) {
        EXPECT_EQ(transfer().accept(listening, &ends.receiving, nullptr), Result::kSuccess);
      }
      if (HasFailure() || std::chrono::steady_clock::now() > end) {
        ADD_FAILURE() << "not connected";
        break;
      }
    }
    EXPECT_EQ(transfer().closeListen(listening), Result::kSuccess);
    return ends;
  }
  static void* listen(void* context, Handle& handle) {
    void* listening = nullptr;
    EXPECT_EQ(plugin().listen(context, 0, handle.data(), &listening), Result::kSuccess);
    return listening;
  }
  // A sender that has that handle, as soon as it may send; null after long, or where that is an error.
  static void* dial(void* context, Handle& handle) {
    void* sending = nullptr;
    for (const auto end = std::chrono::steady_clock::now() + 20s; !sending && std::chrono::steady_clock::now() < end;) {
      if (plugin().connect(context, 0, handle.data(), &sending, nullptr) != Result::kSuccess) break;
      std::this_thread::sleep_for(1ms);
    }
    return sending;
  }
  static void close(const Ends& ends) {
    EXPECT_EQ(transfer().closeSend(ends.sending), Result::kSuccess);
    EXPECT_EQ(transfer().closeRecv(ends.receiving), Result::kSuccess);
  }

  void* context_ = nullptr;
};

inline void* send(void* sending, const Bytes& bytes, int tag = 0) {
  void* request = nullptr;
  // NCCL reads it, and does not declare it so.
  auto* const data = const_cast<uint8_t*>(bytes.data());  // NOLINT(cppcoreguidelines-pro-type-const-cast)
  EXPECT_EQ(transfer().isend(sending, data, bytes.size(), tag, nullptr, nullptr, &request), Result::kSuccess);
  return request;
}

inline void* receive(void* receiving, Bytes& place, int tag = 0) {
  void* request = nullptr;
  void* data = place.data();
  size_t size = place.size();
  EXPECT_EQ(transfer().irecv(receiving, 1, &data, &size, &tag, nullptr, nullptr, &request), Result::kSuccess);
  return request;
}

// What comes of a request at last; `sizes` of its parts.
inline Result finish(void* request, int* sizes = nullptr) {
  int isDone = 0;
  for (const auto end = std::chrono::steady_clock::now() + 20s; isDone == 0;) {
    const Result result = transfer().test(request, &isDone, sizes);
    if (result != Result::kSuccess) return result;
    if (std::chrono::steady_clock::now() > end) {
      ADD_FAILURE() << "a request is not complete after 20 s";
      return Result::kInternalError;
    }
    // The transport's thread is to have the core.
    if (isDone == 0) std::this_thread::sleep_for(20us);
  }
  return Result::kSuccess;
}

// What a sender hears at last that sends one small message after another, which nobody takes.
inline Result sendInVain(void* sending) {
  Bytes byte(1);
  for (const auto end = std::chrono::steady_clock::now() + 10s; std::chrono::steady_clock::now() < end;) {
    void* request = nullptr;
    const Result result = transfer().isend(sending, byte.data(), 1, 0, nullptr, nullptr, &request);
    if (result != Result::kSuccess) return result;
    const Result sent = finish(request);
    if (sent != Result::kSuccess) return sent;
    std::this_thread::sleep_for(1ms);
  }
  return Result::kSuccess;
}

// A message goes over a connection.
inline void expectAMessageArrives(const Ends& ends) {
  const Bytes sent = pattern(1000, 1);
  Bytes place(1000);
  void* const request = send(ends.sending, sent);
  ASSERT_EQ(finish(receive(ends.receiving, place)), Result::kSuccess);
  EXPECT_EQ(place, sent);
  EXPECT_EQ(finish(request), Result::kSuccess);
}

}  // namespace bagua::nccl_net
