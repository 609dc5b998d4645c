// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "backend/net/group.h"
#include "backend/operation/peer_errors.h"

namespace bagua {

// Throws where nothing more comes from `peer`: `error` says why, and is empty where more may come.
inline void throwIfLost(net::Group& group, int peer, const std::string& error) {
  if (error.empty()) return;
  if (group.hasDied(peer)) BAGUA_THROW(PeerDiedError, error);
  BAGUA_THROW(PeerLeftError, error);
}

}  // namespace bagua
