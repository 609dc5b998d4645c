// SPDX-License-Identifier: Apache-2.0
#include "backend/config.h"

#include <c10/util/Exception.h>
#include <c10/util/env.h>
#include <fcntl.h>
#include <string.h>  // NOLINT(modernize-deprecated-headers): explicit_bzero
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <initializer_list>
#include <limits>
#include <locale>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <system_error>

namespace bagua::config {
namespace {

// The one list of our own: another name below does not compile.
constexpr auto kOwn = std::to_array<std::string_view>(
    {"BAGUA_DEFAULT_BUCKET_SIZE", "BAGUA_HOST_ID", "BAGUA_JOB_SECRET", "BAGUA_JOB_SECRET_FILE", "BAGUA_NCCL_CHANNELS",
     "BAGUA_NCCL_NET", "BAGUA_PORT", "BAGUA_SHARED_MEMORY", "BAGUA_SOCKET_CONNECTIONS", "BAGUA_SOCKET_IFNAME",
     "BAGUA_TLS_CA", "BAGUA_TLS_CERTIFICATE", "BAGUA_TLS_KEY", "BAGUA_WARN_AFTER_SECONDS"});

struct Name {
  consteval Name(const char* name) : text(name) {
    if (std::string_view(name).starts_with("BAGUA_") && std::ranges::find(kOwn, name) == kOwn.end())
      throw std::invalid_argument("not in kOwn");
  }
  const char* text;
};

// The first of them that is set.
std::optional<std::string> firstOf(std::initializer_list<Name> names) {
  for (const Name name : names) {
    auto value = c10::utils::get_env(name.text);
    if (value && !value->empty()) return value;
  }
  return std::nullopt;
}

// Of a setting that protects. An empty one means that what was to fill it has failed, as $(cat FILE) does where the
// file is missing.
std::optional<std::string> filled(Name name) {
  auto value = c10::utils::get_env(name.text);
  TORCH_CHECK_VALUE(!value || !value->empty(), "bagua: ", name.text, " is set, but empty: the job would run ",
                    "unprotected. See why what was to fill it has not, or unset it (unset ", name.text,
                    ") on all ranks for a job without a secret");
  return value;
}

template <typename Number>
bool read(const std::string& text, Number& number) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && stop == end;
}

// A stream reads them, as the libstdc++ that wheels are linked with (of GCC 10) has no from_chars of double.
bool read(const std::string& text, double& number) {
  std::istringstream stream(text);
  stream.imbue(std::locale::classic());
  return text.front() != '+' && stream >> std::noskipws >> number && stream.eof();
}

std::optional<bool> zeroOrOne(Name name) {
  const auto text = firstOf({name});
  TORCH_CHECK_VALUE(!text || *text == "0" || *text == "1", "bagua: ", name.text, " is to be 0 or 1, got '", *text, "'");
  return text ? std::optional(*text == "1") : std::nullopt;
}

// `number` is what the setting is where nobody sets it; what is set has to lie in the range.
template <typename Number>
Number numberOf(Name name, Number number, Number least, Number most, const char* expected) {
  const auto text = firstOf({name});
  TORCH_CHECK_VALUE(!text || (read(*text, number) && number >= least && number <= most), "bagua: ", name.text,
                    " is to be ", expected, ", got '", *text, "'");
  return number;
}

// Not through a stream, whose buffer would keep a copy.
std::string readSecret(const std::string& path) {
  constexpr size_t kMost = 4096;
  std::array<char, kMost> text;
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const ssize_t size = file < 0 ? -1 : ::read(file, text.data(), text.size());
  const int error = errno;
  if (file >= 0) close(file);
  TORCH_CHECK_VALUE(size >= 0, "bagua: BAGUA_JOB_SECRET_FILE is to name a file that can be read, got '", path,
                    "': ", std::generic_category().message(error));
  TORCH_CHECK_VALUE(static_cast<size_t>(size) < kMost, "bagua: the secret in '", path, "' (BAGUA_JOB_SECRET_FILE) is ",
                    "to have less than ", kMost, " bytes");
  std::string secret(text.data(), static_cast<size_t>(size));
  explicit_bzero(text.data(), text.size());
  while (!secret.empty() && (secret.back() == '\n' || secret.back() == '\r')) secret.pop_back();
  return secret;
}

}  // namespace

std::vector<std::string> names() { return {kOwn.begin(), kOwn.end()}; }

std::optional<std::string> hostId() { return firstOf({"BAGUA_HOST_ID"}); }

std::optional<std::string> socketInterface() {
  if (auto name = firstOf({"BAGUA_SOCKET_IFNAME"})) return name;
  auto name = firstOf({"GLOO_SOCKET_IFNAME"});
  if (name) name->erase(std::min(name->find(','), name->size()));
  return name;
}

std::optional<std::string> masterAddress() { return firstOf({"MASTER_ADDR"}); }

int socketConnections() { return numberOf("BAGUA_SOCKET_CONNECTIONS", 32, 1, 64, "a number from 1 to 64"); }

PortRange ports() {
  const auto text = firstOf({"BAGUA_PORT"});
  if (!text) return {};
  const auto dash = text->find('-');
  PortRange range;
  const bool isRead = read(text->substr(0, dash), range.first) &&
                      read(dash == std::string::npos ? *text : text->substr(dash + 1), range.last);
  TORCH_CHECK_VALUE(isRead && range.first > 0 && range.first <= range.last,
                    "bagua: BAGUA_PORT is to be a port from 1 to 65535, or a range of them such as 29500-29599, got '",
                    *text, "'");
  return range;
}

int ncclChannels() {
  static const int channels = numberOf("BAGUA_NCCL_CHANNELS", 1, 1, 2, "1 or 2");
  return channels;
}

std::optional<bool> ncclNet() {
  static const std::optional<bool> chosen = zeroOrOne("BAGUA_NCCL_NET");
  return chosen;
}

std::optional<std::string> jobSecret() {
  auto secret = filled("BAGUA_JOB_SECRET");
  const auto path = filled("BAGUA_JOB_SECRET_FILE");
  TORCH_CHECK_VALUE(!secret || !path,
                    "bagua: BAGUA_JOB_SECRET and BAGUA_JOB_SECRET_FILE are both set; set one of them");
  if (path) secret = readSecret(*path);
  if (!secret) return std::nullopt;
  TORCH_CHECK_VALUE(secret->size() >= kShortestSecret, "bagua: the job secret (", path ? "BAGUA_JOB_SECRET_FILE" : "",
                    path ? "" : "BAGUA_JOB_SECRET", ") is to have ", kShortestSecret, " characters or more, got ",
                    secret->size(), ". Draw it at random, as with: openssl rand -hex 32");
  return secret;
}

std::optional<TlsFiles> tlsFiles() {
  auto certificate = firstOf({"BAGUA_TLS_CERTIFICATE"});
  auto key = firstOf({"BAGUA_TLS_KEY"});
  auto authority = firstOf({"BAGUA_TLS_CA"});
  if (!certificate && !key && !authority) return std::nullopt;
  TORCH_CHECK_VALUE(certificate && key && authority,
                    "bagua: BAGUA_TLS_CERTIFICATE, BAGUA_TLS_KEY and BAGUA_TLS_CA are ", "to be set together, and ",
                    !certificate ? "BAGUA_TLS_CERTIFICATE"
                    : !key       ? "BAGUA_TLS_KEY"
                                 : "BAGUA_TLS_CA",
                    " is not");
  return TlsFiles{.certificate = *std::move(certificate), .key = *std::move(key), .authority = *std::move(authority)};
}

bool usesSharedMemory() { return zeroOrOne("BAGUA_SHARED_MEMORY").value_or(true); }

int64_t defaultBucketBytes() {
  static const auto bytes = numberOf<int64_t>("BAGUA_DEFAULT_BUCKET_SIZE", int64_t{10} << 20, 1,
                                              std::numeric_limits<int64_t>::max(), "a positive number of bytes");
  return bytes;
}

std::chrono::milliseconds warnAfter() {
  const auto seconds = numberOf("BAGUA_WARN_AFTER_SECONDS", 30.0, 0.0, 999'999'999.0, "a number of seconds, 0 or more");
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

}  // namespace bagua::config
