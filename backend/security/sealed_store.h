// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "backend/security/job_security.h"

namespace bagua {

// A store whose values are of ranks of this job only: what it writes is encrypted and bound to its key, and of what it
// reads anything else is a DistStoreError. Keys begin with the secret's fingerprint: jobs with different secrets do not
// meet, whatever their prefixes. Whoever can reach the store below can still
// - delete keys, or bring back what the same key held before: who writes a key more than once has to number what it
//   writes, and what is fresh has to be asked for with a name or a number that was drawn for it;
// - make a key exist, which check() and wait() see: only get() and multiGet() prove anything;
// - change counters (add), which have to stay numbers: nothing is to be believed for a counter's sake.
class SealedStore final : public c10d::Store {
 public:
  SealedStore(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<const JobSecurity> security);

  c10::intrusive_ptr<c10d::Store> clone() override;
  using Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  const std::chrono::milliseconds& getTimeout() const noexcept override;
  void setTimeout(const std::chrono::milliseconds& timeout) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<uint8_t>>& values) override;
  // There is no append: parts of a value cannot be sealed one by one.
  bool hasExtendedApi() const override { return false; }

  // Where nothing is sealed.
  [[nodiscard]] c10d::Store& underlying() const { return *store_; }

 private:
  [[nodiscard]] std::string keyOf(const std::string& key) const { return prefix_ + key; }
  [[nodiscard]] std::vector<std::string> keysOf(const std::vector<std::string>& keys) const;
  [[nodiscard]] std::vector<uint8_t> open(const std::string& key, const std::vector<uint8_t>& sealed) const;

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<const JobSecurity> security_;
  const std::string prefix_;
};

// `store` as the ranks of this job are to use it: sealed where the job has a secret (see jobSecurity()), else as it is.
// Null stays null.
c10::intrusive_ptr<c10d::Store> sealedStore(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace bagua
