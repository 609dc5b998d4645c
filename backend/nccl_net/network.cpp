// SPDX-License-Identifier: Apache-2.0
#include "backend/nccl_net/network.h"

#include <c10/util/Exception.h>
#include <ifaddrs.h>
#include <netinet/in.h>

#include <cstring>
#include <fstream>
#include <random>
#include <utility>
#include <vector>

#include "backend/net/process_transport.h"
#include "backend/os/local_address.h"
#include "backend/rendezvous/wire_format.h"

namespace bagua::nccl_net {
namespace {

// Of another version of the wire, it is another number.
constexpr uint64_t kMagic = 0x4E'4C43'434E'4742 + (uint64_t{kWireFormat} << 56U);  // "BGNCCLN"

uint64_t randomNumber() {
  std::random_device device;
  return (uint64_t{device()} << 32U) | device();
}

}  // namespace

// --- Listener --------------------------------------------------------------------------------------------------------

Listener::Listener(std::shared_ptr<net::Transport> transport)
    : transport_(std::move(transport)),
      pair_(randomNumber()),
      membership_(transport_, pair_),
      inbox_(transport_->expect(pair_)) {}

Listener::~Listener() {
  try {
    accept();
  } catch (const std::exception&) {
    // Nobody is there to hear it.
    isTaken_ = true;
  }
}

Handle Listener::handle() const {
  Handle handle{.magic = kMagic, .pair = pair_};
  const std::string address = transport_->address().toString();
  TORCH_INTERNAL_ASSERT(address.size() < sizeof(handle.address));
  std::memcpy(handle.address, address.data(), address.size());
  return handle;
}

std::unique_ptr<Connection> Listener::accept() {
  if (isTaken_) return nullptr;
  const auto key = Connection::greetingKey();
  const auto greeting = inbox_->find(key);
  const auto state = greeting->state();
  if (!state.isComplete()) {
    TORCH_CHECK_WITH(DistNetworkError, state.error.empty(), "the sender has gone while it connected: ", state.error);
    return nullptr;
  }
  const auto context = greeting->context();
  isTaken_ = true;
  return std::make_unique<Connection>(transport_, pair_, Connection::End::kReceiver,
                                      net::ProcessAddress::parse({context.begin(), context.end()}));
}

// --- Network ---------------------------------------------------------------------------------------------------------

Network& Network::ofProcess() {
  static auto* const network = new Network;  // NOLINT(cppcoreguidelines-owning-memory)
  return *network;
}

std::shared_ptr<net::Transport> Network::transport() { return net::processTransport(); }

std::shared_ptr<net::Transport> Network::transportTo(const net::ProcessId& peer) {
  auto own = transport();
  if (own->address().process != peer) return own;
  if (!second_) second_ = net::newTransport();
  return second_;
}

std::unique_ptr<Connection> Network::connect(const void* context, const Handle& handle, Result& result) {
  TORCH_CHECK_VALUE(
      handle.magic == kMagic,
      "the rank to connect to does not use NET/bagua, or another version of it: NCCL_NET_PLUGIN and bagua "
      "have to be the same on all ranks");
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& dialing = dialing_[handle.pair];
  try {
    if (!dialing.connection) {
      const std::string text(handle.address, strnlen(handle.address, sizeof(handle.address)));
      const auto peer = net::ProcessAddress::parse(text);
      dialing = {.context = context,
                 .connection = std::make_unique<Connection>(transportTo(peer.process), handle.pair,
                                                            Connection::End::kSender, peer)};
    }
  } catch (...) {
    dialing_.erase(handle.pair);
    throw;
  }
  const bool isOpen = dialing.connection->isOpen(result);
  if (!isOpen && result == Result::kSuccess) return nullptr;
  auto connection = std::move(dialing.connection);
  dialing_.erase(handle.pair);
  return isOpen ? std::move(connection) : nullptr;
}

void Network::forget(const void* context) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(dialing_, [&](const auto& entry) { return entry.second.context == context; });
}

Network::Device Network::device() {
  Device device;
  const std::string address = net::localAddress();
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return device;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, freeifaddrs);
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    const sockaddr* const own = entry->ifa_addr;
    if (own == nullptr || (own->sa_family != AF_INET && own->sa_family != AF_INET6)) continue;
    const socklen_t size = own->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (net::SocketAddress(own, size).address() != address) continue;
    device.interface = entry->ifa_name;
    int speed = 0;
    // A virtual interface says nothing, or -1.
    if (std::ifstream("/sys/class/net/" + device.interface + "/speed") >> speed && speed > 0) device.speed = speed;
    break;
  }
  return device;
}

}  // namespace bagua::nccl_net
