// SPDX-License-Identifier: Apache-2.0
#include "backend/net/sent_frames.h"

#include <iterator>
#include <utility>

namespace bagua::net {

void SentFrames::keep(OutgoingFrame frame) {
  // The answer may have been faster than the thread that has written it.
  if (acknowledged_ <= written_) kept_.push_back(std::move(frame));
  ++written_;
}

bool SentFrames::acknowledge(uint64_t received) {
  if (received < acknowledged_ || received > given_) return false;
  acknowledged_ = received;
  while (!kept_.empty() && written_ - kept_.size() < received) kept_.pop_front();
  return true;
}

std::vector<OutgoingFrame> SentFrames::takeUnreceived() {
  std::vector<OutgoingFrame> frames(std::move_iterator(kept_.begin()), std::move_iterator(kept_.end()));
  kept_.clear();
  return frames;
}

void SentFrames::copyPayloads(const Outgoing& message, uint64_t end) {
  for (auto& frame : kept_) frame.copyPayload(message, end);
}

}  // namespace bagua::net
