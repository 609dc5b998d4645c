// SPDX-License-Identifier: Apache-2.0
// With certificates both sides prove that they know the job secret. The proofs of the two sides differ, so that a
// stranger who holds a certificate cannot answer with what it was told.
#include <gtest/gtest.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <memory>

#include "backend/net/transport.h"
#include "backend/security/job_security.h"

namespace bagua::net {
namespace {

const std::filesystem::path kFolder = BAGUA_TEST_CERTIFICATES;
using Context = std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)>;
using Connection = std::unique_ptr<SSL, decltype(&SSL_free)>;

// A client of the job's authority that knows nothing of the secret.
Context contextOfCertificate() {
  Context context(SSL_CTX_new(TLS_client_method()), &SSL_CTX_free);
  EXPECT_EQ(SSL_CTX_use_certificate_chain_file(context.get(), (kFolder / "rank.pem").c_str()), 1);
  EXPECT_EQ(SSL_CTX_use_PrivateKey_file(context.get(), (kFolder / "rank_key.pem").c_str(), SSL_FILETYPE_PEM), 1);
  return context;
}

TEST(EchoedProof, OfTheOtherSideIsRefused) {
  const config::TlsFiles files{
      .certificate = kFolder / "rank.pem", .key = kFolder / "rank_key.pem", .authority = kFolder / "authority.pem"};
  const auto security = makeJobSecurity({.secret = "the secret of this job", .certificates = files});
  const auto transport = Transport::listenAt("127.0.0.1", 2, security->encryption());
  // It listens once a group of it has a peer.
  const auto peer = Transport::listenAt("127.0.0.1", 2, security->encryption());
  const auto group = transport->join(7, 0, {transport->address(), peer->address()});
  const SocketAddress address = transport->address().address;
  const UnsharedFile socket(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(connect(socket.number(), address.get(), address.size()), 0) << std::strerror(errno);
  const timeval limit{.tv_sec = 10, .tv_usec = 0};  // of every call below
  ASSERT_EQ(setsockopt(socket.number(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)), 0);

  const Context context = contextOfCertificate();
  const Connection connection(SSL_new(context.get()), &SSL_free);
  ASSERT_EQ(SSL_set_fd(connection.get(), socket.number()), 1);
  ASSERT_EQ(SSL_connect(connection.get()), 1);
  std::array<uint8_t, 32> proof{};
  ASSERT_EQ(SSL_read(connection.get(), proof.data(), proof.size()), static_cast<int>(proof.size()));
  ASSERT_EQ(SSL_write(connection.get(), proof.data(), proof.size()), static_cast<int>(proof.size()));

  // Who is let in is waited for; who is refused finds the connection closed.
  pollfd closed{.fd = socket.number(), .events = POLLIN, .revents = 0};
  ASSERT_EQ(poll(&closed, 1, 5'000), 1) << "the server goes on with a client that has echoed its proof";
  EXPECT_LE(SSL_read(connection.get(), proof.data(), proof.size()), 0);
}

}  // namespace
}  // namespace bagua::net
