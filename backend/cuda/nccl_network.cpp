// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/nccl_network.h"

#include <c10/util/Exception.h>
#include <c10/util/env.h>
#include <pwd.h>
#include <strings.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <vector>

#include "backend/config.h"
#include "backend/os/own_folder.h"
#include "backend/security/job_security.h"

namespace bagua {
namespace {

using std::chrono::microseconds;

// Two channels fill 25 Gbit/s, and one thread of NCCL's serves them all.
constexpr int kCtasBetweenHosts = 2;
// What there are to be enough connections for.
constexpr int64_t kBytesPerSecond = 1'250'000'000;
// What one connection has under way: half of what Linux lets the buffer of a sender grow to.
constexpr int64_t kWindowBytes = 2 << 20;
// NCCL takes 64 sockets of a channel; beyond these a delay is not what is slow.
constexpr int64_t kMostSockets = 32;
constexpr int kSocketsOfAThread = 8;

constexpr std::array kSocketNames = {"NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"};
// NCCL lets its own variable win over what we ask for, but not one that asks for more.
constexpr std::array kChannelNames = {"NCCL_MAX_CTAS",      "NCCL_MIN_CTAS",   "NCCL_MAX_NCHANNELS",
                                      "NCCL_MIN_NCHANNELS", "NCCL_MAX_NRINGS", "NCCL_MIN_NRINGS"};

constexpr const char* kKeepsPlugin = "NCCL_NET_PLUGIN_REF_COUNT";

bool isAnySet(const auto& names) {
  return std::ranges::any_of(names, [](const char* name) { return ncclSetting(name).has_value(); });
}

// In the order in which NCCL reads them: the first that names a setting counts.
std::vector<std::filesystem::path> settingFiles() {
  std::vector<std::filesystem::path> files;
  const auto given = c10::utils::get_env("NCCL_CONF_FILE");
  if (given && !given->empty()) {
    files.emplace_back(*given);
  } else if (const passwd* const user = getpwuid(getuid()); user != nullptr && user->pw_dir != nullptr) {
    files.push_back(std::filesystem::path(user->pw_dir) / ".nccl.conf");
  }
  files.emplace_back("/etc/nccl.conf");
  return files;
}

// RoCE is among them.
bool hasInfiniBand() {
  std::error_code none;
  return std::filesystem::directory_iterator("/sys/class/infiniband", none) != std::filesystem::directory_iterator();
}

}  // namespace

std::optional<std::string> ncclSetting(const char* name) {
  if (auto value = c10::utils::get_env(name)) return value;
  const std::string begin = std::string(name) + "=";
  for (const auto& path : settingFiles()) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
      if (line.starts_with(begin)) return line.substr(begin.size());
    }
  }
  return std::nullopt;
}

std::string ownNetPath() { return (ownFolder() / "libnccl-net-bagua.so").string(); }

bool usesOwnNet() { return config::ncclNet().value_or(jobSecurity() != nullptr); }

void loadOwnNet(bool spansHosts) {
  const std::string path = ownNetPath();
  const std::string why = jobSecurity() ? "a job secret is set" : "BAGUA_NCCL_NET=1";
  const auto allows = [&](const char* name, const std::string& wanted) {
    const auto set = ncclSetting(name);
    std::error_code none;
    const bool isSame = !set || set->empty() || strcasecmp(set->c_str(), wanted.c_str()) == 0 ||
                        std::filesystem::equivalent(*set, wanted, none);
    TORCH_CHECK_VALUE(isSame || !spansHosts, "bagua: NCCL is to send between hosts over bagua's transport (", why,
                      "), but ", name, " is '", *set, "': unset it, or set it to '", wanted, "'");
    return isSame;
  };
  // On one host the user's choice carries nothing.
  if (!allows("NCCL_NET", kOwnNet) || !allows("NCCL_NET_PLUGIN", path)) return;
  // NVLink between hosts goes past every network, in the clear.
  if (jobSecurity() && allows("NCCL_MNNVL_ENABLE", "0")) c10::utils::set_env("NCCL_MNNVL_ENABLE", "0");
  // NCCL takes no more of a name, and divides it at commas. It would then take another network.
  constexpr size_t kMostOfAPath = 254;
  TORCH_CHECK_VALUE(path.size() <= kMostOfAPath && path.find(',') == std::string::npos, "bagua: NCCL cannot load ",
                    path, ", which has a comma or more than ", kMostOfAPath,
                    " characters: install bagua at another path");
  TORCH_CHECK_VALUE(std::filesystem::exists(path), "bagua: NCCL is to send between hosts over bagua's transport (", why,
                    "), but there is no ", path, ": install bagua again");
  c10::utils::set_env("NCCL_NET_PLUGIN", path.c_str());
  // NCCL 2.28 forgets the plugin with its last communicator, unless it is told to keep it.
  if (!ncclSetting(kKeepsPlugin)) c10::utils::set_env(kKeepsPlugin, "1");
}

bool goesOverSockets() {
  if (usesOwnNet()) return false;
  if (const auto net = ncclSetting("NCCL_NET"); net && !net->empty()) return strcasecmp(net->c_str(), "Socket") == 0;
  const auto plugin = ncclSetting("NCCL_NET_PLUGIN");
  if (plugin && !plugin->empty() && *plugin != "none") return false;
  return ncclSetting("NCCL_IB_DISABLE") == "1" || !hasInfiniBand();
}

bool wantsRoundTrip() { return goesOverSockets() && !isAnySet(kSocketNames); }

NcclTerms termsBetweenHosts(microseconds roundTrip) {
  NcclTerms terms;
  if (!goesOverSockets() && !usesOwnNet()) return terms;
  if (!isAnySet(kChannelNames)) terms.maxCtas = kCtasBetweenHosts;
  if (usesOwnNet()) return terms;
  const auto divideUp = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t underWay = kBytesPerSecond * roundTrip.count() / 1'000'000;
  const int64_t sockets = std::min(divideUp(underWay, kWindowBytes * kCtasBetweenHosts), kMostSockets);
  // One does, as everywhere in a hall: what NCCL chooses, for which it knows the network cards of some clouds.
  if (sockets < 2) return terms;
  terms.socketThreads = static_cast<int>(divideUp(sockets, kSocketsOfAThread));
  terms.socketsPerThread = static_cast<int>(divideUp(sockets, terms.socketThreads));
  return terms;
}

void useSockets(const NcclTerms& terms) {
  if (terms.socketThreads == 0 || !wantsRoundTrip()) return;
  c10::utils::set_env("NCCL_SOCKET_NTHREADS", std::to_string(terms.socketThreads).c_str());
  c10::utils::set_env("NCCL_NSOCKS_PERTHREAD", std::to_string(terms.socketsPerThread).c_str());
}

}  // namespace bagua
