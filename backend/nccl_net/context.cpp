// SPDX-License-Identifier: Apache-2.0
#include "backend/nccl_net/context.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <random>
#include <string>
#include <utility>

#include "backend/net/process_transport.h"
#include "backend/rendezvous/wire_format.h"

namespace bagua::nccl_net {
namespace {

// Each version of the wire has a number of its own here.
constexpr uint64_t kMagic = 0x4E'4C43'434E'4742 + (uint64_t{kWireFormat} << 56U);  // "BGNCCLN"

uint64_t randomNumber() {
  std::random_device device;
  return (uint64_t{device()} << 32U) | device();
}

// Returns the transport that reaches `peer`: that of CPU tensors, if there are any, for all but the process itself.
// A process cannot have a link to itself, but to a second transport of its own. Nobody else comes to that one, so it
// needs none of the ports that a firewall lets through. It is never destroyed, as threads of NCCL's may use it at the
// end of the process.
std::shared_ptr<net::Transport> transportTo(const net::ProcessId& peer) {
  auto own = net::processTransport();
  if (own->address().process != peer) return own;
  static const auto* const second = new std::shared_ptr(net::newTransport({}));  // NOLINT
  return *second;
}

}  // namespace

// --- ListenComm ------------------------------------------------------------------------------------------------------

ListenComm::ListenComm(Context& context, std::shared_ptr<net::Transport> transport)
    : context_(context),
      transport_(std::move(transport)),
      pair_(randomNumber()),
      membership_(transport_, pair_),
      inbox_(transport_->expect(pair_)) {}

Handle ListenComm::handle() const {
  Handle handle{.magic = kMagic, .pair = pair_};
  const std::string address = transport_->address().toString();
  TORCH_INTERNAL_ASSERT(address.size() < sizeof(handle.address));
  std::memcpy(handle.address, address.data(), address.size());
  return handle;
}

std::unique_ptr<Comm> ListenComm::accept() {
  if (isTaken_) return nullptr;
  const auto key = Comm::greetingKey();
  const auto greeting = inbox_->find(key);
  const auto state = greeting->state();
  if (!state.isComplete()) {
    TORCH_CHECK_WITH(DistNetworkError, state.error.empty(), "the sender has gone while it connected: ", state.error);
    return nullptr;
  }
  const auto context = greeting->context();
  isTaken_ = true;
  return std::make_unique<Comm>(transport_, pair_, Comm::End::kReceiver,
                                net::ProcessAddress::parse({context.begin(), context.end()}));
}

// --- Context ---------------------------------------------------------------------------------------------------------

ListenComm& Context::listen() {
  auto made = std::make_unique<ListenComm>(*this, net::processTransport());
  auto& listening = *made;
  const std::lock_guard<std::mutex> lock(mutex_);
  listening_.emplace(&listening, std::move(made));
  return listening;
}

void Context::close(const ListenComm& listening) {
  const std::lock_guard<std::mutex> lock(mutex_);
  listening_.erase(&listening);
}

std::unique_ptr<Comm> Context::connect(const Handle& handle, Result& result) {
  TORCH_CHECK_VALUE(
      handle.magic == kMagic,
      "the rank to connect to does not use NET/bagua, or another version of it: NCCL_NET_PLUGIN and bagua "
      "have to be the same on all ranks");
  const std::lock_guard<std::mutex> lock(mutex_);
  auto dialing = dialing_.find(handle.pair);
  if (dialing == dialing_.end()) {
    const std::string text(handle.address, strnlen(handle.address, sizeof(handle.address)));
    const auto peer = net::ProcessAddress::parse(text);
    auto comm = std::make_unique<Comm>(transportTo(peer.process), handle.pair, Comm::End::kSender, peer);
    dialing = dialing_.emplace(handle.pair, std::move(comm)).first;
  }
  const bool isOpen = dialing->second->isOpen(result);
  if (!isOpen && result == Result::kSuccess) return nullptr;
  auto comm = std::move(dialing->second);
  dialing_.erase(dialing);
  return isOpen ? std::move(comm) : nullptr;
}

void Context::clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  listening_.clear();
  dialing_.clear();
}

}  // namespace bagua::nccl_net
