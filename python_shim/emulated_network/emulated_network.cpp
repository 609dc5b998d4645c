// SPDX-License-Identifier: Apache-2.0
// A line between hosts that are network namespaces:
// emulated_network RATE DELAY JITTER BUFFER LOSS SEED INTERFACE...
//
// Every host has one TUN interface. What a host sends leaves at most at RATE bits per second (0: no limit), is lost
// packet by packet with the probability LOSS, and reaches the host that has its destination address DELAY seconds
// later, and up to JITTER seconds more: so much is drawn anew every JITTER seconds, and no packet overtakes another.
// BUFFER seconds of packets wait in front of the line; one that comes when it is full is dropped. With the same SEED
// the same packets are lost. Hosts are told apart by the last byte of their IPv4 address: interface i has byte i + 1.
// The program makes the interfaces, prints "ready", forwards until its standard input ends, and prints what each host
// has sent, as JSON.
//
// With an endless buffer ("inf") a packet is read only when the line is free for it. Until then it waits in the host's
// own queue, where TCP counts it as unsent, as with the interface of the host itself. Any other buffer is one further
// on, of which the host knows nothing: a packet is read at once.
//
// Packets of many segments (TSO) stay in one piece where all of them arrive, or one core could not keep up with
// 10 Gbit/s. They take their place on the line, and are lost or dropped, segment by segment.
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
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "packet.h"

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr size_t kLargestPacket = (size_t{64} << 10) + sizeof(VirtioHeader);
// The line may be this much ahead: less, and it would stand still while this process waits for a core.
constexpr Clock::duration kMostAhead = std::chrono::microseconds(500);
// Of one host before another has its turn.
constexpr int kPacketsInTurn = 16;
// A host's number is less: the last byte of an address.
constexpr uint64_t kLargestNumber = 256;

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

// The interface hands over packets of many segments, whose checksums nobody has computed.
FileDescriptor openTun(const char* name) {
  FileDescriptor device(open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC));
  if (device.number() < 0) fail("cannot open /dev/net/tun");
  ifreq request{};
  if (std::strlen(name) >= sizeof(request.ifr_name)) throw std::invalid_argument("interface name too long");
  std::strcpy(request.ifr_name, name);
  request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
  if (ioctl(device.number(), TUNSETIFF, &request) < 0) fail(std::string("cannot make interface ") + name);
  constexpr unsigned long kFeatures = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO_ECN;
  if (ioctl(device.number(), TUNSETOFFLOAD, kFeatures) < 0) fail("TUNSETOFFLOAD");
  return device;
}

Clock::duration ofSeconds(double seconds) { return std::chrono::duration_cast<Clock::duration>(Seconds(seconds)); }

struct Settings {
  double bitsPerSecond = 0;
  Clock::duration delay{};
  Clock::duration jitter{};
  // Without one packets wait in the host's own queue.
  std::optional<Clock::duration> buffer;
  double loss = 0;
  uint64_t seed = 0;
};

// A host's interface, its line and what is under way from it.
class Host {
 public:
  Host(const char* name, const Settings& settings, uint64_t number)
      : settings_(settings), device_(openTun(name)), lossRandom_(settings.seed * kLargestNumber + number) {}

  [[nodiscard]] int descriptor() const { return device_.number(); }
  [[nodiscard]] bool mayRead(Clock::time_point now) const { return settings_.buffer || lineFree_ <= now + kMostAhead; }
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
      Packet packet({buffer_.begin(), buffer_.begin() + size});
      if (packet.isIpv4() && packet.destination() < hosts) send(std::move(packet), now);
    }
  }

  void deliverDue(Clock::time_point now, const std::vector<Host>& hosts) {
    while (!underWay_.empty() && underWay_.front().due <= now) {
      const Packet& packet = underWay_.front().packet;
      const int to = hosts[packet.destination()].descriptor();
      // An interface that is down, or has no room, drops what comes.
      if (write(to, packet.bytes().data(), packet.bytes().size()) < 0) lost_ += packet.segments();
      underWay_.pop_front();
    }
  }

  void print() const {
    std::printf("{\"packets\": %ld, \"bytes\": %ld, \"lost\": %ld, \"dropped\": %ld}\n", static_cast<long>(packets_),
                static_cast<long>(bytes_), static_cast<long>(lost_), static_cast<long>(dropped_));
  }

 private:
  struct UnderWay {
    Packet packet;
    Clock::time_point due;
  };

  // Segments that pass one after another stay in one piece.
  void send(Packet packet, Clock::time_point now) {
    int64_t first = 0;
    for (int64_t segment = 0; segment < packet.segments(); ++segment) {
      const auto before = lineFree_;
      if (passes(packet.bytesOnTheLine(segment), now)) continue;
      if (segment > first) passOn(packet.part(first, segment - first), before, now);
      first = segment + 1;
    }
    if (first == packet.segments()) return;
    passOn(first == 0 ? std::move(packet) : packet.part(first, packet.segments() - first), lineFree_, now);
  }

  // Gives a segment its place on the line; false: the buffer is full, or the line loses it.
  bool passes(int64_t bytes, Clock::time_point now) {
    ++packets_;
    lineFree_ = std::max(lineFree_, now);
    if (settings_.buffer && lineFree_ - now > *settings_.buffer) {
      ++dropped_;
      return false;
    }
    bytes_ += bytes;
    if (settings_.bitsPerSecond > 0) lineFree_ += ofSeconds(static_cast<double>(8 * bytes) / settings_.bitsPerSecond);
    if (settings_.loss == 0 || std::uniform_real_distribution<double>()(lossRandom_) >= settings_.loss) return true;
    ++lost_;
    return false;
  }

  void passOn(Packet packet, Clock::time_point sent, Clock::time_point now) {
    if (settings_.jitter > Clock::duration(0) && now >= jitterEnds_) {
      jitter_ = Clock::duration(
          std::uniform_int_distribution<Clock::duration::rep>(0, settings_.jitter.count())(jitterRandom_));
      jitterEnds_ = now + settings_.jitter;
    }
    lastDue_ = std::max(lastDue_, sent + settings_.delay + jitter_);
    underWay_.push_back({std::move(packet), lastDue_});
  }

  const Settings settings_;
  FileDescriptor device_;
  std::mt19937_64 lossRandom_;
  std::mt19937_64 jitterRandom_;
  std::array<uint8_t, kLargestPacket> buffer_{};
  std::deque<UnderWay> underWay_;
  // When what has been given a place on the line will have left.
  Clock::time_point lineFree_{};
  Clock::duration jitter_{};
  Clock::time_point jitterEnds_{};
  Clock::time_point lastDue_{};
  // What has come from the host, what of it the line has taken, and what was lost on it or found the buffer full.
  int64_t packets_ = 0;
  int64_t bytes_ = 0;
  int64_t lost_ = 0;
  int64_t dropped_ = 0;
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
  constexpr int kFirstInterface = 7;
  if (argc <= kFirstInterface) {
    std::fputs("usage: emulated_network RATE DELAY JITTER BUFFER LOSS SEED INTERFACE...\n", stderr);
    return 2;
  }
  const double buffer = std::stod(argv[4]);
  const Settings settings{.bitsPerSecond = std::stod(argv[1]),
                          .delay = ofSeconds(std::stod(argv[2])),
                          .jitter = ofSeconds(std::stod(argv[3])),
                          .buffer = std::isinf(buffer) ? std::nullopt : std::optional(ofSeconds(buffer)),
                          .loss = std::stod(argv[5]),
                          .seed = std::stoull(argv[6])};
  // Sleeps end in time: by default the kernel may add 50 us to each.
  prctl(PR_SET_TIMERSLACK, 1UL);
  std::vector<Host> hosts;
  hosts.reserve(static_cast<size_t>(argc));
  for (int i = kFirstInterface; i < argc; ++i) hosts.emplace_back(argv[i], settings, hosts.size());
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
