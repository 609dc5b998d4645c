// SPDX-License-Identifier: Apache-2.0
#include "backend/config.h"

#include <c10/util/Exception.h>
#include <c10/util/env.h>

#include <charconv>

namespace bagua::config {

std::optional<std::string> hostId() {
  auto value = c10::utils::get_env("BAGUA_HOST_ID");
  if (!value || value->empty()) return std::nullopt;
  return value;
}

bool usesSharedMemory() { return c10::utils::get_env("BAGUA_SHARED_MEMORY") != "0"; }

int64_t defaultBucketBytes() {
  const auto text = c10::utils::get_env("BAGUA_DEFAULT_BUCKET_SIZE");
  if (!text || text->empty()) return int64_t{10} << 20;
  int64_t bytes = 0;
  const char* const end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, bytes);
  TORCH_CHECK_VALUE(error == std::errc() && stop == end && bytes > 0,
                    "bagua: BAGUA_DEFAULT_BUCKET_SIZE is to be a positive number of bytes, got '", *text, "'");
  return bytes;
}

}  // namespace bagua::config
