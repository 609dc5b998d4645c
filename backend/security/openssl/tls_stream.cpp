// SPDX-License-Identifier: Apache-2.0
#include "backend/security/openssl/tls_stream.h"

#include <c10/util/Exception.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

namespace bagua {
namespace {

constexpr size_t kRecord = 16U << 10U;
// Read and written at once: fewer calls than with more, and all of it in a core's own cache.
constexpr size_t kPiece = 64U << 10U;
// What somebody who has shown nothing yet may have this process keep.
constexpr size_t kStrangersPiece = 4U << 10U;
constexpr const char* kWhatToCheck =
    ". Check that BAGUA_JOB_SECRET (or the file of BAGUA_JOB_SECRET_FILE) is the same on both sides, and set on both";
constexpr std::string_view kExporter = "EXPORTER-bagua-job-secret";

}  // namespace

// --- OpenSSL's view of the socket ------------------------------------------------------------------------------------

const BIO_METHOD* TlsStream::socketMethod() {
  static const BIO_METHOD* const method = [] {
    BIO_METHOD* const made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "bagua");
    const bool isMade = made != nullptr && BIO_meth_set_read(made, &TlsStream::readBio) == 1 &&
                        BIO_meth_set_write(made, &TlsStream::writeBio) == 1 &&
                        BIO_meth_set_ctrl(made, &TlsStream::controlBio) == 1;
    TORCH_CHECK(isMade, "bagua: OpenSSL cannot make a BIO: ", lastOpenSslError());
    return made;
  }();
  return method;
}

TlsStream& TlsStream::of(BIO* bio) { return *static_cast<TlsStream*>(BIO_get_data(bio)); }

int TlsStream::readBio(BIO* bio, char* data, int size) {
  TlsStream& stream = of(bio);
  BIO_clear_retry_flags(bio);
  if (stream.used_ == stream.filled_) {
    if (!stream.mayAskSocket_) {
      BIO_set_retry_read(bio);
      return -1;
    }
    stream.incoming_.resize(stream.isProven_ ? kPiece : kStrangersPiece);
    const ssize_t got = recv(stream.socket_, stream.incoming_.data(), stream.incoming_.size(), MSG_DONTWAIT);
    if (got <= 0) {
      const bool isLater = got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
      if (isLater) BIO_set_retry_read(bio);
      if (got == 0) stream.hasEnded_ = true;
      if (got < 0 && !isLater) stream.socketError_ = errno;
      return got == 0 ? 0 : -1;
    }
    stream.used_ = 0;
    stream.filled_ = static_cast<size_t>(got);
  }
  const size_t count = std::min(static_cast<size_t>(size), stream.filled_ - stream.used_);
  std::memcpy(data, stream.incoming_.data() + stream.used_, count);
  stream.used_ += count;
  return static_cast<int>(count);
}

int TlsStream::writeBio(BIO* bio, const char* data, int size) {
  TlsStream& stream = of(bio);
  BIO_clear_retry_flags(bio);
  const auto* const bytes = reinterpret_cast<const uint8_t*>(data);
  stream.outgoing_.insert(stream.outgoing_.end(), bytes, bytes + size);
  stream.unsent_ = stream.outgoing_.size() - stream.sent_;
  return size;
}

long TlsStream::controlBio(BIO* /*bio*/, int command, long /*number*/, void* /*pointer*/) {
  return command == BIO_CTRL_FLUSH ? 1 : 0;
}

// --- Handshake -------------------------------------------------------------------------------------------------------

TlsStream::TlsStream(std::shared_ptr<const Tls> tls, int socket, bool isServer)
    : tls_(std::move(tls)), socket_(socket), isServer_(isServer), ssl_(SSL_new(tls_->context_.get()), &SSL_free) {
  BIO* const bio = ssl_ ? BIO_new(socketMethod()) : nullptr;
  TORCH_CHECK(bio != nullptr, "bagua: OpenSSL cannot make a connection: ", lastOpenSslError());
  BIO_set_data(bio, this);
  BIO_set_init(bio, 1);
  SSL_set_bio(ssl_.get(), bio, bio);
  if (isServer) {
    SSL_set_accept_state(ssl_.get());
  } else {
    SSL_set_connect_state(ssl_.get());
  }
}

net::EncryptedStream::Handshake TlsStream::handshake() {
  const Lock lock(mutex_);
  ERR_clear_error();
  mayAskSocket_ = true;
  const Handshake result = goOn();
  // Also what tells the other side why it is refused.
  hasBuffered_ = used_ < filled_ || SSL_pending(ssl_.get()) > 0;
  const bool isGone = flush() < 0 && errno != EAGAIN && errno != EWOULDBLOCK;
  if (result == Handshake::kUnderWay && isGone) return Handshake::kLost;
  return result == Handshake::kDone && stage_ != Stage::kDone ? Handshake::kUnderWay : result;
}

net::EncryptedStream::Handshake TlsStream::goOn() {
  if (stage_ == Stage::kHandshake) {
    const int result = SSL_do_handshake(ssl_.get());
    // The first message of a peer that knows the key says so, before the handshake is over.
    if (!tls_->hasCertificates_ && SSL_session_reused(ssl_.get()) == 1) isProven_ = true;
    if (result != 1) {
      const int why = SSL_get_error(ssl_.get(), result);
      if (why == SSL_ERROR_WANT_READ) return Handshake::kUnderWay;
      return hasBrokenOff() ? Handshake::kLost : fail(lastOpenSslError());
    }
    // Whoever has a certificate of any kind could offer that instead.
    if (!tls_->hasCertificates_ && !isProven_) return fail("the peer has not used the job secret");
    stage_ = tls_->hasCertificates_ ? Stage::kSayProof : Stage::kDone;
  }
  if (stage_ == Stage::kSayProof) {
    const Key proof = proofOf(isServer_);
    if (!encrypt(proof.data(), Key::size())) return fail(lastOpenSslError());
    stage_ = Stage::kHearProof;
  }
  return stage_ == Stage::kHearProof ? hearProof() : Handshake::kDone;
}

// Whether it is the socket that does not go on.
bool TlsStream::hasBrokenOff() {
  if (!hasEnded_ && socketError_ == 0) return false;
  fail(hasEnded_ ? "the peer has ended the connection" : std::generic_category().message(socketError_));
  return true;
}

Key TlsStream::proofOf(bool isServer) {
  std::array<uint8_t, 32> shared{};
  const bool isThere = SSL_export_keying_material(ssl_.get(), shared.data(), shared.size(), kExporter.data(),
                                                  kExporter.size(), nullptr, 0, 0) == 1;
  TORCH_CHECK(isThere, "bagua: OpenSSL does not export keying material: ", lastOpenSslError());
  return authenticate(tls_->keys_.connection, isServer ? "accepts" : "connects", shared);
}

net::EncryptedStream::Handshake TlsStream::hearProof() {
  while (heardBytes_ < heard_.size()) {
    const ssize_t got = readRecord(heard_.data() + heardBytes_, heard_.size() - heardBytes_, true);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return Handshake::kUnderWay;
    // A certificate that is not accepted is heard of here.
    if (got <= 0) return hasBrokenOff() ? Handshake::kLost : fail(lastOpenSslError());
    heardBytes_ += static_cast<size_t>(got);
  }
  if (!isEqual(proofOf(!isServer_), heard_)) return fail("the peer has another job secret");
  isProven_ = true;
  stage_ = Stage::kDone;
  return Handshake::kDone;
}

net::EncryptedStream::Handshake TlsStream::fail(const std::string& why) {
  error_ = "no TLS connection: " + why + kWhatToCheck;
  return Handshake::kFailed;
}

// --- Reading ---------------------------------------------------------------------------------------------------------

ssize_t TlsStream::readRecord(void* data, size_t size, bool mayAskSocket) {
  mayAskSocket_ = mayAskSocket;
  ERR_clear_error();
  size_t got = 0;
  const int result = SSL_read_ex(ssl_.get(), data, size, &got);
  hasBuffered_ = used_ < filled_ || SSL_pending(ssl_.get()) > 0;
  if (result == 1) return static_cast<ssize_t>(got);
  const int why = SSL_get_error(ssl_.get(), result);
  if (why == SSL_ERROR_ZERO_RETURN || hasEnded_) return 0;
  errno = why == SSL_ERROR_WANT_READ ? EAGAIN : socketError_ != 0 ? socketError_ : EBADMSG;
  return -1;
}

ssize_t TlsStream::receive(void* data, size_t size, bool mayAskSocket) {
  size_t filled = 0;
  while (filled < size) {
    const Lock lock(mutex_);
    const ssize_t got = readRecord(static_cast<uint8_t*>(data) + filled, size - filled, mayAskSocket);
    // An end, or an error, is found again by the next call.
    if (got <= 0) return filled > 0 ? static_cast<ssize_t>(filled) : got;
    filled += static_cast<size_t>(got);
  }
  return static_cast<ssize_t>(filled);
}

// --- Writing ---------------------------------------------------------------------------------------------------------

bool TlsStream::encrypt(const void* data, size_t size) {
  ERR_clear_error();
  encryptedWithKey_ += size;
  if (encryptedWithKey_ >= tls_->bytesPerKey_) {
    encryptedWithKey_ = size;
    if (SSL_key_update(ssl_.get(), SSL_KEY_UPDATE_NOT_REQUESTED) != 1) return false;
  }
  size_t written = 0;
  return SSL_write_ex(ssl_.get(), data, size, &written) == 1 && written == size;
}

size_t TlsStream::encryptRecord(std::span<const iovec> parts, size_t from) {
  std::array<uint8_t, kRecord> joined;
  size_t size = 0;
  for (const auto& part : parts) {
    if (from >= part.iov_len) {
      from -= part.iov_len;
      continue;
    }
    const auto* const begin = static_cast<const uint8_t*>(part.iov_base) + from;
    const size_t count = std::min(part.iov_len - from, kRecord - size);
    from = 0;
    if (size == 0 && count == kRecord) return encrypt(begin, kRecord) ? kRecord : 0;
    std::memcpy(joined.data() + size, begin, count);
    size += count;
    if (size == kRecord) break;
  }
  return encrypt(joined.data(), size) ? size : 0;
}

ssize_t TlsStream::flush() {
  while (sent_ < outgoing_.size()) {
    const ssize_t count =
        ::send(socket_, outgoing_.data() + sent_, outgoing_.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      const int error = errno;
      outgoing_.erase(outgoing_.begin(), outgoing_.begin() + static_cast<ptrdiff_t>(sent_));
      sent_ = 0;
      errno = error;
      return -1;
    }
    sent_ += static_cast<size_t>(count);
    unsent_ = outgoing_.size() - sent_;
  }
  outgoing_.clear();
  sent_ = 0;
  return 0;
}

ssize_t TlsStream::send(std::span<const iovec> parts) {
  size_t total = 0;
  for (const auto& part : parts) total += part.iov_len;
  size_t taken = 0;
  while (true) {
    const Lock lock(mutex_);
    while (taken < total && outgoing_.size() - sent_ < kPiece) {
      const size_t count = encryptRecord(parts, taken);
      if (count == 0) {
        errno = EBADMSG;
        return -1;
      }
      taken += count;
    }
    if (flush() < 0) return taken > 0 ? static_cast<ssize_t>(taken) : -1;
    if (taken == total) return static_cast<ssize_t>(taken);
  }
}

}  // namespace bagua
