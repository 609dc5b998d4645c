// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "kernels/codec.h"

namespace bagua::compressed {

// Users get it where they name none. It is the one place that says so.
inline constexpr const char* kDefaultCodec = "int8";

// How chunks are coded on the two ways of an exchange. Random numbers depend on a key and on the position of a chunk's
// first element in the flat tensor, never on the number of ranks.
struct Coding {
  std::shared_ptr<const Codec> codec = CodecRegistry::find(kDefaultCodec).codec;
  // Of the values that a rank sends to the owners of chunks. Residuals have an element for every one of the flat
  // tensor; a rank uses those of its own lanes.
  Encoding sender = {};
  // Of the chunks that a rank owns. Residuals have ownLength() elements.
  Encoding owner = {};
};

// With random numbers by `key` for the senders, and by another for the owners.
inline Coding codingOf(std::shared_ptr<const Codec> codec, uint64_t key) {
  constexpr uint64_t kOfOwners = 0xA24BAED4963EE407U;
  return {.codec = std::move(codec), .sender = {.key = key}, .owner = {.key = key ^ kOfOwners}};
}

}  // namespace bagua::compressed
