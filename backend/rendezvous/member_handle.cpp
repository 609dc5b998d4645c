// SPDX-License-Identifier: Apache-2.0
#include "backend/rendezvous/member_handle.h"

#include <c10/util/Exception.h>
#include <fcntl.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <exception>
#include <mutex>
#include <optional>
#include <random>
#include <sstream>
#include <system_error>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "backend/config.h"
#include "backend/net/listener.h"
#include "backend/operation/operation.h"
#include "backend/os/fork_held_mutex.h"
#include "backend/os/local_address.h"
#include "backend/os/process_mark.h"

namespace bagua {
namespace {

constexpr const char* kScheme = "bagua";
constexpr size_t kTokenDigits = 16;
constexpr int kRankDigits = 6;

struct Server {
  ProcessMark mark;
  c10::intrusive_ptr<c10d::TCPStore> store;
};

c10::intrusive_ptr<c10d::TCPStore> startServer() {
  const std::string address = net::localAddress();
  const auto listening = net::listenAt(address, config::ports());
  c10d::TCPStoreOptions options;
  options.port = net::addressOf(listening).port();
  options.isServer = true;
  options.waitWorkers = false;
  // The server owns what it is given.
  const int file = fcntl(listening.number(), F_DUPFD_CLOEXEC, 0);
  TORCH_CHECK_WITH(DistNetworkError, file >= 0, "bagua: no file for a store: ", std::generic_category().message(errno));
  options.masterListenFd = file;
  return c10::make_intrusive<c10d::TCPStore>(address, options);
}

uint16_t portOfServer() {
  // Never destroyed: peers may need it until the process has ended, when the order of destruction is anybody's.
  static auto* const mutex = new ForkHeldMutex;           // NOLINT(cppcoreguidelines-owning-memory)
  static auto* const server = new std::optional<Server>;  // NOLINT(cppcoreguidelines-owning-memory)
  const std::lock_guard lock(*mutex);
  // The parent's thread is not here.
  if (*server && (*server)->mark.isFromParent()) neverDestroy(std::move((*server)->store));
  if (!*server || (*server)->mark.isFromParent()) {
    server->reset();
    server->emplace(Server{.mark = {}, .store = startServer()});
  }
  return (*server)->store->getPort();
}

std::string newToken() {
  std::random_device device;
  std::string token(kTokenDigits + 1, '\0');
  std::snprintf(token.data(), token.size(), "%08x%08x", device(), device());
  token.pop_back();
  return token;
}

template <typename Number>
std::optional<Number> numberIn(const std::string& text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

}  // namespace

MemberHandle MemberHandle::draw(int rank) {
  return {.rank = rank, .token = newToken(), .address = net::localAddress(), .port = portOfServer()};
}

std::string MemberHandle::toString() const {
  std::string digits = std::to_string(rank);
  // Sorted as texts, handles are in the order of ranks.
  if (digits.size() < kRankDigits) digits.insert(0, kRankDigits - digits.size(), '0');
  return c10::str(kScheme, ":", digits, ":", token, ":", port, ":", address);
}

MemberHandle MemberHandle::parse(const std::string& text) {
  std::vector<std::string> fields;
  std::istringstream rest(text);
  for (std::string field; fields.size() < 4 && std::getline(rest, field, ':');) fields.push_back(field);
  MemberHandle handle;
  // An IPv6 address has colons itself.
  std::getline(rest, handle.address);
  const bool hasFields = fields.size() == 4 && fields[0] == kScheme && fields[2].size() == kTokenDigits;
  const auto rank = hasFields ? numberIn<int>(fields[1]) : std::nullopt;
  const auto port = hasFields ? numberIn<uint16_t>(fields[3]) : std::nullopt;
  TORCH_CHECK_VALUE(rank && *rank >= 0 && port && *port != 0 && !handle.address.empty(), "bagua: '",
                    text.substr(0, 200), "' is not the reconfigure handle of a group of backend 'bagua'");
  handle.rank = *rank;
  handle.token = fields[2];
  handle.port = *port;
  return handle;
}

c10::intrusive_ptr<c10d::Store> MemberHandle::connect(std::chrono::milliseconds timeout) const {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.waitWorkers = false;
  options.timeout = timeout;
  try {
    return c10::make_intrusive<c10d::TCPStore>(address, options);
  } catch (const std::exception&) {
    TORCH_CHECK_WITH(DistBackendError, false, "bagua: the first member of the new group, ", toString(),
                     ", did not answer within ", timeout.count(), " ms: ", messageOf(std::current_exception()),
                     ". Is its process alive, and may others reach that port?");
  }
}

}  // namespace bagua
