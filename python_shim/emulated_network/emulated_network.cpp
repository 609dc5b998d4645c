// SPDX-License-Identifier: Apache-2.0
// A network with distance for hosts that are network namespaces: emulated_network RATE DELAY LOSS INTERFACE...
//
// Every host has one TUN interface. What a host sends leaves at most at RATE bits per second (0: no limit), is lost
// with the probability LOSS, and reaches the host that has its destination address DELAY seconds later. Hosts are told
// apart by the last byte of their IPv4 address: interface i has byte i + 1. The program makes the interfaces, prints
// "ready", forwards until its standard input ends, and prints what each host has sent: packets, bytes and losses, as
// JSON.
//
// A packet is read only when the line is free for it. Until then it waits in the host's own queue, where TCP counts it
// as unsent, as with a real interface; so no queue here overflows. Packets of many segments (TSO) stay in one piece, or
// one core could not keep up with 10 Gbit/s; the line is charged for the headers of every segment. Where packets are to
// be lost they come one by one.
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// The kernel's virtio_net_hdr, whose header is not C++: what it tells of a packet that comes in one piece.
struct VirtioHeader {
  uint8_t flags;
  uint8_t segmentation;  // 0: one segment
  uint16_t headerBytes;
  uint16_t segmentBytes;
  uint16_t checksumStart;
  uint16_t checksumOffset;
};
static_assert(sizeof(VirtioHeader) == 10);

// Of Ethernet, for every segment.
constexpr int64_t kLinkHeaderBytes = 14;
constexpr size_t kLargestPacket = (size_t{64} << 10) + sizeof(VirtioHeader);
// The line may be this much ahead: less, and it would stand still while this process waits for a core.
constexpr Clock::duration kMostAhead = std::chrono::microseconds(500);
// Of one host before another has its turn.
constexpr int kPacketsInTurn = 16;

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

class FileDescriptor {
 public:
  explicit FileDescriptor(int number) : number_(number) {}
  FileDescriptor(FileDescriptor&& other) noexcept : number_(other.number_) { other.number_ = -1; }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  FileDescriptor& operator=(FileDescriptor&&) = delete;
  ~FileDescriptor() {
    if (number_ >= 0) close(number_);
  }
  [[nodiscard]] int number() const { return number_; }

 private:
  int number_;
};

// `offloads`: hands over packets of many segments, whose checksums nobody has computed.
FileDescriptor openTun(const char* name, bool offloads) {
  FileDescriptor device(open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC));
  if (device.number() < 0) fail("cannot open /dev/net/tun");
  ifreq request{};
  if (std::strlen(name) >= sizeof(request.ifr_name)) throw std::invalid_argument("interface name too long");
  std::strcpy(request.ifr_name, name);
  request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
  if (ioctl(device.number(), TUNSETIFF, &request) < 0) fail(std::string("cannot make interface ") + name);
  const unsigned long features = offloads ? TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO_ECN : 0;
  if (ioctl(device.number(), TUNSETOFFLOAD, features) < 0) fail("TUNSETOFFLOAD");
  return device;
}

// As read() gives it: a VirtioHeader, then IPv4.
struct Packet {
  std::vector<uint8_t> bytes;
  Clock::time_point due;
  size_t destination = 0;
};

bool isIpv4(const std::vector<uint8_t>& bytes) {
  constexpr size_t kHeaders = sizeof(VirtioHeader) + 20;
  return bytes.size() >= kHeaders && bytes[sizeof(VirtioHeader)] >> 4U == 4;
}

// The index of the host that has the destination address.
size_t destinationOf(const std::vector<uint8_t>& bytes) {
  constexpr size_t kLastByteOfDestination = sizeof(VirtioHeader) + 19;
  return bytes[kLastByteOfDestination] - size_t{1};
}

// What the packet takes of a real line, where every segment has headers.
int64_t bytesOnTheLine(const std::vector<uint8_t>& bytes) {
  VirtioHeader header{};
  std::memcpy(&header, bytes.data(), sizeof(header));
  const auto size = static_cast<int64_t>(bytes.size() - sizeof(header));
  if (header.segmentation == 0 || header.segmentBytes == 0) return size + kLinkHeaderBytes;
  const int64_t payload = std::max<int64_t>(size - header.headerBytes, 1);
  const int64_t segments = (payload + header.segmentBytes - 1) / header.segmentBytes;
  return payload + segments * (header.headerBytes + kLinkHeaderBytes);
}

struct Settings {
  double bitsPerSecond = 0;
  Clock::duration delay{};
  double loss = 0;
};

// A host's interface, its line and what is under way from it.
class Host {
 public:
  Host(const char* name, const Settings& settings)
      : settings_(settings), device_(openTun(name, settings.loss == 0)), random_(std::hash<std::string>{}(name)) {}

  [[nodiscard]] int descriptor() const { return device_.number(); }
  [[nodiscard]] bool mayRead(Clock::time_point now) const { return lineFree_ <= now + kMostAhead; }
  // When something is to be done though nothing comes: a packet arrives, or the line is free again.
  [[nodiscard]] Clock::time_point nextEvent(Clock::time_point now) const {
    auto next = Clock::time_point::max();
    if (!underWay_.empty()) next = underWay_.front().due;
    if (!mayRead(now)) next = std::min(next, lineFree_ - kMostAhead);
    return next;
  }

  void takePackets(Clock::time_point now, size_t hosts) {
    for (int i = 0; i < kPacketsInTurn && mayRead(now); ++i) {
      const ssize_t size = read(descriptor(), buffer_.data(), buffer_.size());
      if (size <= 0) return;
      Packet packet{.bytes = {buffer_.begin(), buffer_.begin() + size}, .due = {}};
      if (!isIpv4(packet.bytes)) continue;
      packet.destination = destinationOf(packet.bytes);
      if (packet.destination >= hosts) continue;
      send(std::move(packet), now);
    }
  }

  void deliverDue(Clock::time_point now, const std::vector<Host>& hosts) {
    while (!underWay_.empty() && underWay_.front().due <= now) {
      const Packet& packet = underWay_.front();
      const int to = hosts[packet.destination].descriptor();
      // An interface that is down, or has no room, drops what comes.
      if (write(to, packet.bytes.data(), packet.bytes.size()) < 0) ++lost_;
      underWay_.pop_front();
    }
  }

  void print() const {
    std::printf("{\"packets\": %ld, \"bytes\": %ld, \"lost\": %ld}\n", static_cast<long>(packets_),
                static_cast<long>(bytes_), static_cast<long>(lost_));
  }

 private:
  void send(Packet packet, Clock::time_point now) {
    const int64_t bytes = bytesOnTheLine(packet.bytes);
    ++packets_;
    bytes_ += bytes;
    lineFree_ = std::max(lineFree_, now);
    if (settings_.bitsPerSecond > 0) {
      const Seconds onTheLine(static_cast<double>(8 * bytes) / settings_.bitsPerSecond);
      lineFree_ += std::chrono::duration_cast<Clock::duration>(onTheLine);
    }
    if (settings_.loss > 0 && std::uniform_real_distribution<double>()(random_) < settings_.loss) {
      ++lost_;
      return;
    }
    packet.due = lineFree_ + settings_.delay;
    underWay_.push_back(std::move(packet));
  }

  const Settings settings_;
  FileDescriptor device_;
  std::mt19937_64 random_;
  std::array<uint8_t, kLargestPacket> buffer_{};
  std::deque<Packet> underWay_;
  Clock::time_point lineFree_{};
  int64_t packets_ = 0;
  int64_t bytes_ = 0;
  int64_t lost_ = 0;
};

// Until standard input ends: so also when whoever started us has died.
void forward(std::vector<Host>& hosts) {
  while (true) {
    auto now = Clock::now();
    auto next = Clock::time_point::max();
    for (const auto& host : hosts) next = std::min(next, host.nextEvent(now));
    std::vector<pollfd> events{{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0}};
    for (const auto& host : hosts) {
      events.push_back({.fd = host.mayRead(now) ? host.descriptor() : -1, .events = POLLIN, .revents = 0});
    }
    timespec limit{.tv_sec = 1, .tv_nsec = 0};
    if (next != Clock::time_point::max()) {
      const auto left = std::clamp<Clock::duration>(next - now, Clock::duration(0), std::chrono::seconds(1));
      const auto whole = std::chrono::duration_cast<std::chrono::seconds>(left);
      limit = {.tv_sec = whole.count(), .tv_nsec = std::chrono::nanoseconds(left - whole).count()};
    }
    if (ppoll(events.data(), events.size(), &limit, nullptr) < 0 && errno != EINTR) fail("ppoll");
    if (events[0].revents != 0) return;
    now = Clock::now();
    for (size_t i = 0; i < hosts.size(); ++i) {
      if (events[i + 1].revents != 0) hosts[i].takePackets(now, hosts.size());
    }
    for (auto& host : hosts) host.deliverDue(Clock::now(), hosts);
  }
}

int run(int argc, char** argv) {
  if (argc < 5) {
    std::fputs("usage: emulated_network BITS_PER_SECOND DELAY_SECONDS LOSS INTERFACE...\n", stderr);
    return 2;
  }
  const Settings settings{.bitsPerSecond = std::stod(argv[1]),
                          .delay = std::chrono::duration_cast<Clock::duration>(Seconds(std::stod(argv[2]))),
                          .loss = std::stod(argv[3])};
  // Sleeps end in time: by default the kernel may add 50 us to each.
  prctl(PR_SET_TIMERSLACK, 1UL);
  std::vector<Host> hosts;
  hosts.reserve(static_cast<size_t>(argc));
  for (int i = 4; i < argc; ++i) hosts.emplace_back(argv[i], settings);
  std::puts("ready");
  std::fflush(stdout);
  forward(hosts);
  for (const auto& host : hosts) host.print();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "emulated_network: %s\n", error.what());
    return 1;
  }
}
