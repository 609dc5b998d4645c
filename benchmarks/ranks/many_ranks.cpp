// SPDX-License-Identifier: Apache-2.0
// What an operation takes of each of many ranks: time, messages, bytes, connections, memory, and requests to the store.
//
//   many_ranks --ranks 2,8,32 --ranks-per-host 1 --seconds 1 --json FILE [--only all_reduce_4096,barrier]
//
// Ranks are processes forked before anything runs in them, so that many fit on one machine. They meet in a TCPStore, as
// torch's do, and speak over loopback; BAGUA_HOST_ID tells each which emulated host it is on. Each operation has
// processes and a group of its own, so that its connections are counted alone. Ends with 1 where a result is wrong.
#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iomanip>
#include <iostream>
#include <new>
#include <sstream>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "backend/process_group/process_group_bagua.h"
#include "benchmarks/ranks/sockets.h"

namespace bagua::ranks {
namespace {

using Clock = std::chrono::steady_clock;

// One operation on `bytes` of every rank; its result is checked in the first call.
struct Measured {
  std::string name;
  int64_t bytes = 0;
  std::function<void(ProcessGroupBagua& group, int64_t bytes)> call;
  std::function<bool(ProcessGroupBagua& group, int64_t bytes)> isRight;
};

struct Settings {
  std::vector<int> ranks{2, 8, 32};
  int ranksPerHost = 1;
  double seconds = 1;
  std::vector<std::string> only;
  std::string json;
};

// Of one rank.
struct Sample {
  double groupSeconds = 0;
  double firstSeconds = 0;
  double callSeconds = 0;
  SocketCounts perRun;
  int64_t connections = 0;
  int64_t storeConnections = 0;
  int64_t groupRequests = 0;
  double idleRequestsPerSecond = 0;
  int64_t memory = 0;
  bool isRight = false;
};

// In memory that all ranks see.
struct Meeting {
  pthread_barrier_t barrier;
  int calls;
  Sample samples[];
};

double secondsSince(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// --- Operations ------------------------------------------------------------------------------------------------------

double sumOfRanks(const ProcessGroupBagua& group) { return group.getSize() * (group.getSize() + 1) / 2.0; }

at::Tensor allReduced(ProcessGroupBagua& group, int64_t bytes) {
  std::vector<at::Tensor> tensors{at::full({bytes / 4}, group.getRank() + 1, at::kFloat)};
  group.allreduce(tensors, {})->wait();
  return tensors.front();
}

at::Tensor exchangedWithAll(ProcessGroupBagua& group, int64_t bytes) {
  const int64_t size = group.getSize();
  at::Tensor input = at::arange(size, at::kInt).repeat_interleave(bytes / 4) + group.getRank() * 1000;
  at::Tensor output = at::empty_like(input);
  std::vector<int64_t> even;
  group.alltoall_base(output, input, even, even, {})->wait();
  return output;
}

Measured allReduce(int64_t bytes) {
  return {"all_reduce_" + std::to_string(bytes), bytes,
          [](ProcessGroupBagua& group, int64_t size) { allReduced(group, size); },
          [](ProcessGroupBagua& group, int64_t size) {
            return allReduced(group, size).eq(sumOfRanks(group)).all().item<bool>();
          }};
}

// Rank 0 has the sum, the others what they gave.
at::Tensor reduced(ProcessGroupBagua& group, int64_t bytes) {
  std::vector<at::Tensor> tensors{at::full({bytes / 4}, group.getRank() + 1, at::kFloat)};
  group.reduce(tensors, {})->wait();
  return tensors.front();
}

at::Tensor scattered(ProcessGroupBagua& group, int64_t bytes) {
  at::Tensor input = at::full({group.getSize() * bytes / 4}, group.getRank() + 1, at::kFloat);
  at::Tensor output = at::empty({bytes / 4}, at::kFloat);
  group._reduce_scatter_base(output, input, {})->wait();
  return output;
}

std::vector<Measured> allMeasured() {
  return {allReduce(4096),
          allReduce(65536),
          allReduce(1 << 20),
          {"barrier", 0, [](ProcessGroupBagua& group, int64_t) { group.barrier({})->wait(); },
           [](ProcessGroupBagua&, int64_t) { return true; }},
          {"reduce_4096", 4096, [](ProcessGroupBagua& group, int64_t size) { reduced(group, size); },
           [](ProcessGroupBagua& group, int64_t size) {
             const double expected = group.getRank() == 0 ? sumOfRanks(group) : group.getRank() + 1;
             return reduced(group, size).eq(expected).all().item<bool>();
           }},
          // Of each rank for each.
          {"reduce_scatter_1024", 1024, [](ProcessGroupBagua& group, int64_t size) { scattered(group, size); },
           [](ProcessGroupBagua& group, int64_t size) {
             return scattered(group, size).eq(sumOfRanks(group)).all().item<bool>();
           }},
          {"all_to_all_1024", 1024, [](ProcessGroupBagua& group, int64_t size) { exchangedWithAll(group, size); },
           [](ProcessGroupBagua& group, int64_t size) {
             const at::Tensor from = at::arange(group.getSize(), at::kInt).repeat_interleave(size / 4) * 1000;
             return exchangedWithAll(group, size).eq(from + group.getRank()).all().item<bool>();
           }}};
}

// --- One rank --------------------------------------------------------------------------------------------------------

c10::intrusive_ptr<ProcessGroupBagua> makeGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  auto options = c10::make_intrusive<ProcessGroupBagua::Options>(std::chrono::minutes(5));
  options->group_name = "ranks";
  return c10::make_intrusive<ProcessGroupBagua>(store, rank, size, options);
}

void measure(const Measured& measured, const Settings& settings, int rank, int size, int listening, uint16_t port,
             Meeting& meeting) {
  Sample& sample = meeting.samples[rank];
  const auto meet = [&] { pthread_barrier_wait(&meeting.barrier); };
  at::set_num_threads(1);
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = rank == 0;
  options.waitWorkers = false;
  options.useLibUV = true;
  options.timeout = std::chrono::minutes(5);
  if (rank == 0) options.masterListenFd = listening;
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const int64_t memory = privateMemory();
  const auto before = countSockets(port);
  meet();
  const auto begin = Clock::now();
  const auto group = makeGroup(c10::make_intrusive<c10d::PrefixStore>("group", store), rank, size);
  sample.groupSeconds = secondsSince(begin);
  meet();
  sample.groupRequests = countSockets(port).store.segments - before.store.segments;
  meet();
  const auto first = Clock::now();
  sample.isRight = measured.isRight(*group, measured.bytes);
  sample.firstSeconds = secondsSince(first);
  meet();
  const auto trial = Clock::now();
  for (int i = 0; i < 3; ++i) measured.call(*group, measured.bytes);
  if (rank == 0) meeting.calls = std::clamp(static_cast<int>(settings.seconds / (secondsSince(trial) / 3)), 5, 500);
  meet();
  const auto since = countSockets(port);
  meet();
  const auto start = Clock::now();
  for (int i = 0; i < meeting.calls; ++i) measured.call(*group, measured.bytes);
  sample.callSeconds = secondsSince(start) / meeting.calls;
  meet();
  const auto after = countSockets(port);
  sample.perRun = {.connections = 0,
                   .segments = after.peers.segments - since.peers.segments,
                   .bytes = after.peers.bytes - since.peers.bytes};
  sample.connections = after.peers.connections;
  sample.storeConnections = after.store.connections;
  sample.memory = privateMemory() - memory;
  meet();
  const auto idle = Clock::now();
  const auto idleBefore = countSockets(port).store.segments;
  std::this_thread::sleep_for(std::chrono::duration<double>(std::max(1.0, settings.seconds)));
  sample.idleRequestsPerSecond =
      static_cast<double>(countSockets(port).store.segments - idleBefore) / secondsSince(idle);
  meet();
  group->shutdown();
  meet();
}

[[noreturn]] void runRank(const Measured& measured, const Settings& settings, int rank, int size, int listening,
                          uint16_t port, Meeting& meeting) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  setenv("BAGUA_HOST_ID", ("many ranks, host " + std::to_string(rank / settings.ranksPerHost)).c_str(), 1);
  setenv("BAGUA_SOCKET_IFNAME", "lo", 1);
  int status = 0;
  try {
    measure(measured, settings, rank, size, listening, port, meeting);
  } catch (const std::exception& error) {
    std::cerr << "rank " << rank << " of " << size << ", " << measured.name << ": " << error.what() << std::endl;
    status = 1;
  }
  // Without the destructors of what forking has copied.
  _exit(status);
}

// --- All ranks -------------------------------------------------------------------------------------------------------

int listenOnLoopback(uint16_t& port) {
  const int listening = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  TORCH_CHECK(listening >= 0 && bind(listening, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                  listen(listening, 4096) == 0 &&
                  getsockname(listening, reinterpret_cast<sockaddr*>(&address), &size) == 0,
              "cannot listen on loopback: ", std::strerror(errno));
  port = ntohs(address.sin_port);
  return listening;
}

// Whether all have ended well; ends the others where one has not.
bool waitForAll(const std::vector<pid_t>& processes) {
  bool isWell = true;
  for (size_t left = processes.size(); left > 0; --left) {
    int status = 0;
    wait(&status);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    if (std::exchange(isWell, false)) {
      for (const pid_t process : processes) kill(process, SIGKILL);
    }
  }
  return isWell;
}

std::vector<Sample> run(const Measured& measured, const Settings& settings, int size) {
  const size_t bytes = sizeof(Meeting) + sizeof(Sample) * static_cast<size_t>(size);
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(memory != MAP_FAILED, "no memory to share: ", std::strerror(errno));
  auto* const meeting = static_cast<Meeting*>(memory);
  pthread_barrierattr_t attributes;
  pthread_barrierattr_init(&attributes);
  pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_barrier_init(&meeting->barrier, &attributes, static_cast<unsigned>(size));
  for (int rank = 0; rank < size; ++rank) new (&meeting->samples[rank]) Sample();
  uint16_t port = 0;
  const int listening = listenOnLoopback(port);
  std::vector<pid_t> processes;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t process = fork();
    TORCH_CHECK(process >= 0, "cannot make rank ", rank, ": ", std::strerror(errno));
    if (process == 0) runRank(measured, settings, rank, size, listening, port, *meeting);
    processes.push_back(process);
  }
  close(listening);
  TORCH_CHECK(waitForAll(processes), measured.name, " failed on ", size, " ranks");
  std::vector<Sample> samples(meeting->samples, meeting->samples + size);
  for (auto& sample : samples) {
    sample.perRun.segments /= meeting->calls;
    sample.perRun.bytes /= meeting->calls;
  }
  munmap(memory, bytes);
  return samples;
}

struct Statistic {
  double mean = 0;
  double most = 0;
};
template <class Value>
Statistic over(const std::vector<Sample>& samples, Value value) {
  Statistic statistic;
  for (const auto& sample : samples) {
    const auto number = static_cast<double>(value(sample));
    statistic.mean += number / static_cast<double>(samples.size());
    statistic.most = std::max(statistic.most, number);
  }
  return statistic;
}

// Prints a row of the table, and returns its object in JSON.
std::string report(const Measured& measured, const Settings& settings, int size, const std::vector<Sample>& samples) {
  const auto group = over(samples, [](const Sample& sample) { return sample.groupSeconds; });
  const auto first = over(samples, [](const Sample& sample) { return sample.firstSeconds; });
  const auto call = over(samples, [](const Sample& sample) { return sample.callSeconds; });
  const auto messages = over(samples, [](const Sample& sample) { return sample.perRun.segments; });
  const auto bytes = over(samples, [](const Sample& sample) { return sample.perRun.bytes; });
  const auto connections = over(samples, [](const Sample& sample) { return sample.connections; });
  const auto memory = over(samples, [](const Sample& sample) { return sample.memory; });
  const auto idle = over(samples, [](const Sample& sample) { return sample.idleRequestsPerSecond; });
  const auto requests = over(samples, [](const Sample& sample) { return sample.groupRequests; });
  std::cout << std::left << std::setw(20) << measured.name << std::right << std::setw(6) << size << std::fixed
            << std::setprecision(2) << std::setw(11) << call.most * 1e3 << std::setw(10) << messages.mean
            << std::setw(7) << static_cast<int>(messages.most) << std::setw(12) << static_cast<int64_t>(bytes.mean)
            << std::setw(9) << connections.mean << std::setw(6) << static_cast<int>(connections.most) << std::setw(9)
            << memory.mean / (1 << 20) << std::setw(10) << group.most * 1e3 << std::setw(10) << first.most * 1e3
            << std::setw(8) << requests.mean << std::setw(8) << idle.mean << std::endl;
  std::ostringstream json;
  json << R"({"operation": ")" << measured.name << R"(", "ranks": )" << size << R"(, "ranks_per_host": )"
       << settings.ranksPerHost << R"(, "seconds": )" << call.most << R"(, "messages": )" << messages.mean
       << R"(, "most_messages": )" << messages.most << R"(, "sent_bytes": )" << bytes.mean << R"(, "most_sent_bytes": )"
       << bytes.most << R"(, "connections": )" << connections.mean << R"(, "most_connections": )" << connections.most
       << R"(, "private_bytes": )" << memory.mean << R"(, "group_seconds": )" << group.most
       << R"(, "first_call_seconds": )" << first.most << R"(, "store_requests_of_group": )" << requests.mean
       << R"(, "idle_store_requests_per_second": )" << idle.mean << "}";
  return json.str();
}

Settings settingsOf(int count, char** arguments) {
  Settings settings;
  const auto split = [](const std::string& text) {
    std::vector<std::string> parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
    return parts;
  };
  for (int i = 1; i < count; i += 2) {
    const std::string name = arguments[i];
    TORCH_CHECK_VALUE(i + 1 < count, name, " needs a value");
    const std::string value = arguments[i + 1];
    if (name == "--ranks") {
      settings.ranks.clear();
      for (const auto& part : split(value)) settings.ranks.push_back(std::stoi(part));
    } else if (name == "--ranks-per-host") {
      settings.ranksPerHost = std::stoi(value);
    } else if (name == "--seconds") {
      settings.seconds = std::stod(value);
    } else if (name == "--only") {
      settings.only = split(value);
    } else if (name == "--json") {
      settings.json = value;
    } else {
      TORCH_CHECK_VALUE(false, "unknown option ", name);
    }
  }
  return settings;
}

int runAll(const Settings& settings) {
  std::cout << std::left << std::setw(20) << "operation" << std::right << std::setw(6) << "ranks" << std::setw(11)
            << "ms" << std::setw(10) << "messages" << std::setw(7) << "most" << std::setw(12) << "bytes" << std::setw(9)
            << "connect." << std::setw(6) << "most" << std::setw(9) << "MiB" << std::setw(10) << "group ms"
            << std::setw(10) << "first ms" << std::setw(8) << "store" << std::setw(8) << "store/s" << std::endl;
  bool isRight = true;
  std::string json;
  for (const int size : settings.ranks) {
    for (const auto& measured : allMeasured()) {
      const auto& only = settings.only;
      if (!only.empty() && std::find(only.begin(), only.end(), measured.name) == only.end()) continue;
      const auto samples = run(measured, settings, size);
      json += (json.empty() ? " " : ",\n ") + report(measured, settings, size, samples);
      for (size_t rank = 0; rank < samples.size(); ++rank) {
        if (samples[rank].isRight) continue;
        std::cerr << measured.name << " on " << size << " ranks: rank " << rank << " has a wrong result" << std::endl;
        isRight = false;
      }
    }
  }
  if (!settings.json.empty()) std::ofstream(settings.json) << "[\n" << json << "\n]\n";
  return isRight ? 0 : 1;
}

}  // namespace
}  // namespace bagua::ranks

int main(int count, char** arguments) {
  try {
    return bagua::ranks::runAll(bagua::ranks::settingsOf(count, arguments));
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
