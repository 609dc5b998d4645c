// SPDX-License-Identifier: Apache-2.0
#include "backend/net/listener.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "backend/net/frame.h"
#include "backend/net/transport.h"

namespace bagua::net {
namespace {

constexpr size_t kMostGuests = 1024;
constexpr size_t kFewestGuests = 64;
// Guests that are here already have their turn between so many that are accepted.
constexpr int kAcceptedAtATime = 64;
// Files become free when connections or other files of the process end: nobody tells of that.
constexpr std::chrono::milliseconds kPauseWithoutFiles{500};
constexpr std::chrono::minutes kWarningInterval{1};

// Guests may use a part of the files that this process may have open.
size_t mostGuestsOfProcess() {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return kFewestGuests;
  return std::clamp<size_t>(files.rlim_cur / 4, kFewestGuests, kMostGuests);
}

// Not open: see errno.
UnsharedFile tryToListenAt(const SocketAddress& address) {
  UnsharedFile socket(::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.isOpen()) return {};
  // A port that is asked for by its number is free as soon as nobody listens there: the kernel holds the connections of
  // a job that has just ended for a minute.
  const int isAskedFor = address.port() != 0 ? 1 : 0;
  setsockopt(socket.number(), SOL_SOCKET, SO_REUSEADDR, &isAskedFor, sizeof(isAskedFor));
  if (bind(socket.number(), address.get(), address.size()) == 0 && listen(socket.number(), SOMAXCONN) == 0) {
    return socket;
  }
  const int error = errno;
  socket = {};
  errno = error;
  return {};
}

bool isOutOfFiles(int error) { return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM; }

}  // namespace

UnsharedFile listenAt(const std::string& address, config::PortRange ports) {
  for (int port = ports.first; port <= ports.last; ++port) {
    UnsharedFile socket = tryToListenAt(SocketAddress(address, static_cast<uint16_t>(port)));
    if (socket.isOpen()) return socket;
    TORCH_CHECK_WITH(DistNetworkError, errno == EADDRINUSE && ports.first != 0, "bagua: cannot listen at ", address,
                     " port ", port, ": ", std::generic_category().message(errno));
  }
  C10_THROW_ERROR(
      DistNetworkError,
      c10::str("bagua: cannot listen at ", address, ": all ports of BAGUA_PORT=", ports.first, "-", ports.last,
               " are taken. Each process of a host needs one, of a group that is ",
               "reconfigured two, with bagua.elastic three: name more ports (also to the firewall), or end ",
               "what holds these"));
}

// A connection that has not said yet whose it is, nor shown that it may be here.
class Listener::Guest final : public EventLoop::Handler {
 public:
  Guest(std::weak_ptr<Listener> listener, Stream stream) : listener_(std::move(listener)), stream_(std::move(stream)) {}

  void onReadable() override {
    const auto listener = listener_.lock();
    const auto transport = listener ? listener->transport_.lock() : nullptr;
    if (!transport || !stream_.isOpen()) return;
    using Handshake = EncryptedStream::Handshake;
    const auto state = isWelcome_ ? Handshake::kDone : stream_.handshake();
    if (state == Handshake::kUnderWay) return waitFor(*listener);
    isWelcome_ = state == Handshake::kDone;
    if (isWelcome_) return hear(*listener, *transport);
    listener->noteRefusal(stream_);
    leave(*listener);
  }
  void onWritable() override { onReadable(); }

  [[nodiscard]] bool isHere() const { return stream_.isOpen(); }
  void leave(Listener& listener) {
    if (!stream_.isOpen()) return;
    listener.loop_->remove(stream_.number());
    stream_.close();
  }

 private:
  void waitFor(Listener& listener) { listener.loop_->askForWritable(stream_.number(), stream_.hasUnsent()); }

  void hear(Listener& listener, Transport& transport) {
    auto* const place = reinterpret_cast<uint8_t*>(&hello_) + read_;
    const ssize_t size = stream_.receive(place, sizeof(hello_) - read_);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return waitFor(listener);
    if (size > 0) read_ += static_cast<size_t>(size);
    if (size > 0 && read_ < sizeof(hello_)) return;
    listener.loop_->remove(stream_.number());
    if (size > 0) transport.welcome(hello_, std::move(stream_));
    stream_.close();
  }

  const std::weak_ptr<Listener> listener_;
  Stream stream_;
  bool isWelcome_ = false;
  Hello hello_;
  size_t read_ = 0;
};

Listener::Listener(std::weak_ptr<Transport> transport, std::shared_ptr<EventLoop> loop, int socket)
    : transport_(std::move(transport)), loop_(std::move(loop)), socket_(socket), mostGuests_(mostGuestsOfProcess()) {}

void Listener::onReadable() {
  const auto transport = transport_.lock();
  if (!transport) return;
  for (int i = 0; i < kAcceptedAtATime; ++i) {
    UnsharedFile accepted(accept4(socket_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!accepted.isOpen()) {
      if (isOutOfFiles(errno)) pause(errno);
      return;
    }
    try {
      letIn(*transport, std::move(accepted));
    } catch (const std::exception& error) {
      // This one is turned away: the others may still come.
      LOG(ERROR) << "bagua: cannot take a connection: " << error.what();
    }
  }
}

void Listener::letIn(Transport& transport, UnsharedFile accepted) {
  std::erase_if(guests_, [](const auto& guest) { return !guest->isHere(); });
  if (guests_.size() >= mostGuests_) sendOldestAway();
  configure(accepted);
  const int number = accepted.number();
  const auto& encryption = transport.opening_.encryption;
  auto encrypted = encryption ? encryption->accept(number) : nullptr;
  const auto guest = std::make_shared<Guest>(weak_from_this(), Stream(std::move(accepted), std::move(encrypted)));
  loop_->add(number, guest, false);
  guests_.push_back(guest);
}

void Listener::sendOldestAway() {
  const auto oldest = std::move(guests_.front());
  guests_.pop_front();
  try {
    // This process may be late: what the guest has said may lie in its socket.
    oldest->onReadable();
  } catch (const std::exception& error) {
    LOG(ERROR) << "bagua: cannot take a connection: " << error.what();
  }
  oldest->leave(*this);
}

void Listener::pause(int error) {
  warn(pauseTold_, "cannot accept connections for now: " + std::generic_category().message(error) +
                       ". Peers that connect have to wait. A higher limit of open files (ulimit -n) may help");
  loop_->remove(socket_);
  goOnLater();
}

void Listener::goOnLater() {
  loop_->callLater(kPauseWithoutFiles, [self = shared_from_this()] {
    const auto transport = self->transport_.lock();
    if (!transport) return;
    try {
      self->loop_->add(self->socket_, self, false);
    } catch (const c10::Error&) {
      // The kernel may lack memory for it, too, for as long as files are scarce.
      self->goOnLater();
    }
  });
}

void Listener::noteRefusal(const Stream& stream) {
  ++refused_;
  warn(refusalTold_, "refused a connection from " + peerOf(stream.socket()) + ": " + stream.error() +
                         ". Refused so far: " + std::to_string(refused_));
}

void Listener::warn(std::optional<std::chrono::steady_clock::time_point>& last, const std::string& text) {
  const auto now = std::chrono::steady_clock::now();
  if (last && now - *last < kWarningInterval) return;
  LOG(WARNING) << "bagua: " << text;
  last = now;
}

}  // namespace bagua::net
