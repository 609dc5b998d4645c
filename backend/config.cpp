// SPDX-License-Identifier: Apache-2.0
#include "backend/config.h"

#include <c10/util/Exception.h>
#include <c10/util/env.h>

#include <algorithm>
#include <charconv>
#include <initializer_list>

namespace bagua::config {
namespace {

// The first of them that is set.
std::optional<std::string> firstOf(std::initializer_list<const char*> names) {
  for (const char* const name : names) {
    auto value = c10::utils::get_env(name);
    if (value && !value->empty()) return value;
  }
  return std::nullopt;
}

template <typename Number>
bool read(const std::string& text, Number& number) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && stop == end;
}

int64_t readDefaultBucketBytes() {
  const auto text = c10::utils::get_env("BAGUA_DEFAULT_BUCKET_SIZE");
  if (!text || text->empty()) return int64_t{10} << 20;
  int64_t bytes = 0;
  TORCH_CHECK_VALUE(read(*text, bytes) && bytes > 0,
                    "bagua: BAGUA_DEFAULT_BUCKET_SIZE is to be a positive number of bytes, got '", *text, "'");
  return bytes;
}

}  // namespace

std::optional<std::string> hostId() {
  auto value = c10::utils::get_env("BAGUA_HOST_ID");
  if (!value || value->empty()) return std::nullopt;
  return value;
}

HostTransport hostTransport() {
  static const HostTransport transport = [] {
    const auto text = firstOf({"BAGUA_HOST_TRANSPORT"}).value_or("sockets");
    TORCH_CHECK_VALUE(text == "sockets" || text == "gloo",
                      "bagua: BAGUA_HOST_TRANSPORT is to be 'sockets' or 'gloo', got '", text, "'");
    return text == "gloo" ? HostTransport::kGloo : HostTransport::kSockets;
  }();
  return transport;
}

std::optional<std::string> socketInterface() { return firstOf({"BAGUA_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}); }

std::optional<std::string> masterAddress() { return firstOf({"MASTER_ADDR"}); }

int socketConnections() {
  const auto text = firstOf({"BAGUA_SOCKET_CONNECTIONS"});
  int count = 8;
  TORCH_CHECK_VALUE(!text || (read(*text, count) && count >= 1 && count <= 64),
                    "bagua: BAGUA_SOCKET_CONNECTIONS is to be a number from 1 to 64, got '", *text, "'");
  return count;
}

bool usesSharedMemory() { return c10::utils::get_env("BAGUA_SHARED_MEMORY") != "0"; }

int64_t defaultBucketBytes() {
  static const int64_t bytes = readDefaultBucketBytes();
  return bytes;
}

std::chrono::milliseconds warnAfter() {
  const auto text = firstOf({"BAGUA_WARN_AFTER_SECONDS"});
  if (!text) return std::chrono::seconds(30);
  double seconds = 0;
  TORCH_CHECK_VALUE(read(*text, seconds) && seconds >= 0 && seconds < 1e9,
                    "bagua: BAGUA_WARN_AFTER_SECONDS is to be a number of seconds, 0 or more, got '", *text, "'");
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

size_t recordedOperations() {
  const auto text = firstOf({"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"});
  int64_t count = 2000;
  TORCH_CHECK_VALUE(!text || read(*text, count), "bagua: TORCH_FR_BUFFER_SIZE is to be a number of operations, got '",
                    *text, "'");
  return static_cast<size_t>(std::max<int64_t>(count, 0));
}

bool writesFlightRecorder() {
  const auto text = firstOf({"TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"});
  return !text || (*text != "0" && *text != "false");
}

bool checksPrograms() {
  static const bool checks = c10::utils::get_env("BAGUA_CHECK_PROGRAMS") != "0";
  return checks;
}

}  // namespace bagua::config
