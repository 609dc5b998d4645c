// SPDX-License-Identifier: Apache-2.0
#include "backend/rendezvous/rank_record.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <bit>
#include <exception>
#include <map>
#include <random>
#include <sstream>
#include <thread>

#include "backend/config.h"
#include "backend/net/process_transport.h"
#include "backend/operation/hash.h"
#include "backend/operation/operation.h"
#include "backend/rendezvous/wire_format.h"
#include "backend/security/job_security.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;

constexpr const char* kSameVersion = "install the same version of bagua on all hosts";
constexpr const char* kSameTorch = "install the same torch, and the bagua built for it, on all hosts";
constexpr const char* kSameMachines = "use machines of one byte order";
constexpr const char* kSameVariable = "set this environment variable to the same value on all ranks";

std::string ncclNet() {
  const auto chosen = config::ncclNet();
  return chosen ? std::to_string(static_cast<int>(*chosen)) : "not set";
}

std::string fingerprintOfSecret() {
  const auto security = jobSecurity();
  return security ? "set to the secret " + security->fingerprint() : "not set";
}

// What has to be the same on all ranks. This is the one place where such a thing is added.
struct AgreedField {
  const char* name;
  std::string (*own)();
  const char* advice;
};
const std::array kAgreedFields{
    AgreedField{"wire_format", [] { return std::to_string(kWireFormat); }, kSameVersion},
    AgreedField{"bagua", [] { return std::string(BAGUA_VERSION); }, kSameVersion},
    AgreedField{"torch", [] { return c10::str(TORCH_VERSION_MAJOR, ".", TORCH_VERSION_MINOR); }, kSameTorch},
    AgreedField{"byte_order", [] { return std::string(std::endian::native == std::endian::little ? "little" : "big"); },
                kSameMachines},
    // Of ranks that meet without the store, over a group of another backend.
    AgreedField{"BAGUA_JOB_SECRET", &fingerprintOfSecret, kSameVariable},
    AgreedField{"BAGUA_TLS_CERTIFICATE", [] { return std::string(config::tlsFiles() ? "set" : "not set"); },
                "set it, with BAGUA_TLS_KEY and BAGUA_TLS_CA, on all ranks or on none"},
    AgreedField{"BAGUA_NCCL_CHANNELS", [] { return std::to_string(config::ncclChannels()); }, kSameVariable},
    AgreedField{"BAGUA_NCCL_NET", &ncclNet, kSameVariable},
    AgreedField{"BAGUA_DEFAULT_BUCKET_SIZE", [] { return std::to_string(config::defaultBucketBytes()); },
                kSameVariable},
};
constexpr const char* kHost = "host";
constexpr const char* kAddress = "address";
// Drawn for each group.
constexpr const char* kNonce = "nonce";
constexpr const char* kRefusal = "refusal";

using Fields = std::map<std::string, std::string>;

// A peer's text may be of another version, or anything.
Fields fieldsOf(const std::string& record) {
  Fields fields;
  std::istringstream lines(record);
  for (std::string line; std::getline(lines, line);) {
    const size_t end = line.find('=');
    if (end != std::string::npos) fields.emplace(line.substr(0, end), line.substr(end + 1));
  }
  return fields;
}

std::string valueOf(const Fields& fields, const char* name) {
  constexpr size_t kMost = 400;
  const auto field = fields.find(name);
  if (field == fields.end()) return "not told (an older version?)";
  return c10::str("'", field->second.substr(0, kMost), "'");
}

void addLine(std::string& record, const char* name, std::string value) {
  std::ranges::replace(value, '\n', ' ');
  record += c10::str(name, "=", value, "\n");
}

void checkAgree(const std::vector<Fields>& ranks) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    TORCH_CHECK_VALUE(!ranks[rank].contains(kRefusal), "bagua: rank ", rank,
                      " cannot take part in a group: ", valueOf(ranks[rank], kRefusal));
  }
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    std::string differences;
    for (const auto& field : kAgreedFields) {
      const std::string first = valueOf(ranks[0], field.name);
      const std::string other = valueOf(ranks[rank], field.name);
      if (first == other) continue;
      differences += c10::str(differences.empty() ? "" : "; ", field.name, " is ", first, " on rank 0 and ", other,
                              " on rank ", rank, ": ", field.advice);
    }
    TORCH_CHECK_VALUE(differences.empty(), "bagua: rank 0 and rank ", rank, " cannot work in one group. ", differences);
  }
}

// Of a group on one host nobody may ever ask for it.
std::string ownAddress() {
  try {
    return net::processTransport()->address().toString();
  } catch (const std::exception&) {
    return "none: " + messageOf(std::current_exception());
  }
}

std::string newNonce() {
  std::random_device device;
  return c10::str(device(), "-", device());
}

std::string keyOf(int rank) { return "host/" + std::to_string(rank); }

// Returns who has not come: "rank 1, 3", whose keys are not in the store yet, or the store itself.
std::string whoIsMissing(c10d::Store& store, const std::vector<std::string>& keys) {
  std::vector<size_t> missing;
  try {
    for (size_t rank = 0; rank < keys.size(); ++rank) {
      if (!store.check({keys[rank]})) missing.push_back(rank);
    }
  } catch (const std::exception&) {
    return "the store, which does not answer";
  }
  return c10::str("rank ", c10::Join(", ", missing));
}

// A rank waits before it raises what all ranks are about to: if its process ends, the store may end with it.
void waitUntilAllHaveRead(c10d::Store& store, int size) {
  constexpr milliseconds kLimit{2000};
  constexpr milliseconds kPause{10};
  const auto end = std::chrono::steady_clock::now() + kLimit;
  try {
    int64_t count = store.add("hosts_read", 1);
    while (count < size && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(kPause);
      count = store.add("hosts_read", 0);
    }
  } catch (const std::exception&) {
    // The store has gone: nobody can read any more.
    return;
  }
}

// Whether an earlier rank has the same address, and therefore the same process.
bool isThreadBesideAnother(const std::vector<std::string>& addresses, size_t rank) {
  const auto end = addresses.begin() + static_cast<std::ptrdiff_t>(rank);
  return !addresses[rank].starts_with("none: ") && std::find(addresses.begin(), end, addresses[rank]) != end;
}

// Ranks that are threads of one process, as in tests of frameworks, get addresses of their own.
void separateThreads(c10d::Store& store, size_t rank, GroupMembers& members) {
  const auto key = [](size_t peer) { return "thread/" + std::to_string(peer); };
  if (isThreadBesideAnother(members.addresses, rank)) {
    members.ownTransport = net::newTransport();
    store.set(key(rank), members.ownTransport->address().toString());
  }
  const std::vector<std::string> found = members.addresses;
  for (size_t peer = 0; peer < found.size(); ++peer) {
    if (!isThreadBesideAnother(found, peer)) continue;
    // This wait ends with the change for which the members meet, as get() of a missing key would not.
    store.wait({key(peer)}, store.getTimeout());
    members.addresses[peer] = store.get_to_str(key(peer));
  }
}

}  // namespace

std::string ownRecord() {
  std::string record;
  try {
    addLine(record, kHost, localHostId());
    addLine(record, kAddress, ownAddress());
    addLine(record, kNonce, newNonce());
    for (const auto& field : kAgreedFields) addLine(record, field.name, field.own());
  } catch (const std::exception&) {
    addLine(record, kRefusal, messageOf(std::current_exception()));
  }
  return record;
}

GroupMembers membersOf(const std::vector<std::string>& records) {
  std::vector<Fields> ranks;
  ranks.reserve(records.size());
  for (const auto& record : records) ranks.push_back(fieldsOf(record));
  checkAgree(ranks);
  std::vector<std::string> hosts;
  std::vector<std::string> addresses;
  std::string nonces;
  for (const auto& fields : ranks) {
    const auto host = fields.find(kHost);
    TORCH_CHECK_VALUE(host != fields.end(), "bagua: rank ", hosts.size(), " does not tell its host");
    hosts.push_back(host->second);
    const auto address = fields.find(kAddress);
    addresses.push_back(address == fields.end() ? "none: it does not tell" : address->second);
    const auto nonce = fields.find(kNonce);
    nonces += nonce == fields.end() ? "," : nonce->second + ",";
  }
  return {.topology = HostTopology(hosts), .addresses = std::move(addresses), .id = hashOf(nonces)};
}

GroupMembers exchangeRecords(c10d::Store& store, int rank, int size, milliseconds timeout) {
  const std::string own = ownRecord();
  store.set(keyOf(rank), own);
  std::vector<std::string> keys;
  keys.reserve(size);
  for (int peer = 0; peer < size; ++peer) keys.push_back(keyOf(peer));
  try {
    store.wait(keys, timeout);
  } catch (const std::exception&) {
    TORCH_CHECK_WITH(DistBackendError, false, "bagua: rank ", rank, " of ", size,
                     " could not make the process group: ", messageOf(std::current_exception()), ". Not there after ",
                     timeout.count(), " ms: ", whoIsMissing(store, keys),
                     ". Check that these processes have started and are alive");
  }
  std::vector<std::string> records;
  records.reserve(size);
  for (const auto& value : store.multiGet(keys)) records.emplace_back(value.begin(), value.end());
  // Not as the store has it: what was recorded of an earlier group would be that on all ranks alike.
  records[rank] = own;
  try {
    return membersHere(store, rank, records);
  } catch (const c10::ValueError&) {
    waitUntilAllHaveRead(store, size);
    throw;
  }
}

GroupMembers membersHere(c10d::Store& store, int rank, const std::vector<std::string>& records) {
  auto members = membersOf(records);
  separateThreads(store, static_cast<size_t>(rank), members);
  if (!members.addresses[rank].starts_with("none: ")) {
    const auto transport = members.ownTransport ? members.ownTransport : net::processTransport();
    members.membership = std::make_shared<const net::Membership>(transport, members.id);
  }
  return members;
}

}  // namespace bagua
