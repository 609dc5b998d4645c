// SPDX-License-Identifier: Apache-2.0
#include "backend/security/sealed_store.h"

#include <c10/util/Exception.h>

#include <utility>

namespace bagua {

SealedStore::SealedStore(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<const JobSecurity> security)
    : store_(std::move(store)), security_(std::move(security)), prefix_("sealed/" + security_->fingerprint() + "/") {}

std::vector<std::string> SealedStore::keysOf(const std::vector<std::string>& keys) const {
  std::vector<std::string> names;
  names.reserve(keys.size());
  for (const auto& key : keys) names.push_back(keyOf(key));
  return names;
}

std::vector<uint8_t> SealedStore::open(const std::string& key, const std::vector<uint8_t>& sealed) const {
  auto value = security_->open(key, sealed);
  TORCH_CHECK_WITH(
      DistStoreError, value.has_value(), "bagua: what the store holds at '", key,
      "' was not written there by a rank with this job's secret: somebody else writes to the store, or has ",
      "moved or changed it");
  return *std::move(value);
}

c10::intrusive_ptr<c10d::Store> SealedStore::clone() {
  return c10::make_intrusive<SealedStore>(store_->clone(), security_);
}

void SealedStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  store_->set(keyOf(key), security_->seal(key, value));
}

std::vector<uint8_t> SealedStore::get(const std::string& key) { return open(key, store_->get(keyOf(key))); }

int64_t SealedStore::add(const std::string& key, int64_t value) { return store_->add(keyOf(key), value); }

bool SealedStore::deleteKey(const std::string& key) { return store_->deleteKey(keyOf(key)); }

bool SealedStore::check(const std::vector<std::string>& keys) { return store_->check(keysOf(keys)); }

int64_t SealedStore::getNumKeys() { return store_->getNumKeys(); }

void SealedStore::wait(const std::vector<std::string>& keys) { store_->wait(keysOf(keys)); }

void SealedStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  store_->wait(keysOf(keys), timeout);
}

const std::chrono::milliseconds& SealedStore::getTimeout() const noexcept { return store_->getTimeout(); }

void SealedStore::setTimeout(const std::chrono::milliseconds& timeout) { store_->setTimeout(timeout); }

std::vector<std::vector<uint8_t>> SealedStore::multiGet(const std::vector<std::string>& keys) {
  auto values = store_->multiGet(keysOf(keys));
  TORCH_CHECK_WITH(DistStoreError, values.size() == keys.size(), "bagua: the store has answered for ", values.size(),
                   " keys, not for ", keys.size());
  for (size_t index = 0; index < keys.size(); ++index) values[index] = open(keys[index], values[index]);
  return values;
}

void SealedStore::multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<uint8_t>>& values) {
  TORCH_CHECK_VALUE(keys.size() == values.size(), "bagua: ", keys.size(), " keys for ", values.size(), " values");
  std::vector<std::vector<uint8_t>> sealed;
  sealed.reserve(values.size());
  for (size_t index = 0; index < keys.size(); ++index) sealed.push_back(security_->seal(keys[index], values[index]));
  store_->multiSet(keysOf(keys), sealed);
}

c10::intrusive_ptr<c10d::Store> sealedStore(const c10::intrusive_ptr<c10d::Store>& store) {
  const auto security = jobSecurity();
  if (!security || !store) return store;
  return c10::make_intrusive<SealedStore>(store, security);
}

}  // namespace bagua
