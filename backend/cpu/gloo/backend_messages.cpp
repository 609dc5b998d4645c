// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/gloo/backend_messages.h"

#include <ATen/ops/empty.h>

#include <vector>

namespace bagua {
namespace {

// The transport matches messages by their tags alone, and Gloo ends the process when one is larger than the place for
// it. With its size in the tag it meets one of another size only where they differ by a multiple of the prime below;
// otherwise both ends wait until the timeout, whose error names what either is in. Tags up to 16 bits leave room for
// that, with the size modulo a prime; these have the upper one of the two bits set that BackendWire's own have.
constexpr int kTagBits = 16;
constexpr int64_t kSizesTold = 8191;
constexpr int kTagWithSize = 1 << 30;
// With the one size that no other tag has.
constexpr int kNumbered = kTagWithSize | static_cast<int>(kSizesTold) << kTagBits;

int transportTag(const at::Tensor& bytes, int tag) {
  if (tag >> kTagBits != 0) return tag;
  return kTagWithSize | static_cast<int>(bytes.numel() % kSizesTold) << kTagBits | tag;
}

}  // namespace

c10::intrusive_ptr<c10d::Work> BackendMessages::send(const at::Tensor& bytes, int peer, int tag) {
  std::vector<at::Tensor> tensors{bytes};
  return backend_->send(tensors, peer, transportTag(bytes, tag));
}

c10::intrusive_ptr<c10d::Work> BackendMessages::receive(const at::Tensor& bytes, int peer, int tag) {
  std::vector<at::Tensor> tensors{bytes};
  const int sizedTag = transportTag(bytes, tag);
  if (peer >= 0) return backend_->recv(tensors, peer, sizedTag);
  // Gloo has no empty place for what may come from any rank; a message of nothing fits one that is larger, too.
  if (bytes.numel() == 0) tensors[0] = at::empty({1}, bytes.options());
  return backend_->recvAnysource(tensors, sizedTag);
}

c10::intrusive_ptr<c10d::Work> BackendMessages::sendNumbered(const at::Tensor& bytes, int peer, uint64_t /*number*/) {
  return send(bytes, peer, kNumbered);
}

c10::intrusive_ptr<c10d::Work> BackendMessages::receiveNumbered(const at::Tensor& bytes, int peer,
                                                                uint64_t /*number*/) {
  return receive(bytes, peer, kNumbered);
}

}  // namespace bagua
