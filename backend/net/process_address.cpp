// SPDX-License-Identifier: Apache-2.0
#include "backend/net/process_address.h"

#include <c10/util/Exception.h>

#include <charconv>
#include <cstdio>

namespace bagua::net {

std::string ProcessAddress::toString() const {
  char id[33];
  std::snprintf(id, sizeof(id), "%016llx%016llx", static_cast<unsigned long long>(process[0]),
                static_cast<unsigned long long>(process[1]));
  return std::string(id) + "@" + address.address() + ":" + std::to_string(address.port());
}

ProcessAddress ProcessAddress::parse(const std::string& text) {
  const auto at = text.find('@');
  const auto colon = text.rfind(':');
  uint64_t high = 0;
  uint64_t low = 0;
  uint16_t port = 0;
  const auto isNumber = [&](size_t begin, size_t end, auto& value, int base) {
    const char* const last = text.data() + end;
    const auto [stop, error] = std::from_chars(text.data() + begin, last, value, base);
    return error == std::errc() && stop == last;
  };
  const bool isComplete = at == 32 && colon != std::string::npos && colon > at && isNumber(0, 16, high, 16) &&
                          isNumber(16, 32, low, 16) && isNumber(colon + 1, text.size(), port, 10);
  TORCH_CHECK_VALUE(isComplete, "bagua: '", text, "' is not the address of a process");
  return {{high, low}, SocketAddress(text.substr(at + 1, colon - at - 1), port)};
}

}  // namespace bagua::net
