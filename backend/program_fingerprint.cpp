// SPDX-License-Identifier: Apache-2.0
#include "backend/program_fingerprint.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <sstream>

#include "backend/hash.h"
#include "backend/peer_errors.h"

namespace bagua {
namespace {

constexpr std::array<const char*, 9> kReductions{"sum", "avg", "product", "min",       "max",
                                                 "and", "or",  "xor",     "premul_sum"};

template <size_t size>
std::string textOf(const char (&text)[size]) {
  return {text, ::strnlen(text, size)};
}

// `to` is all zeros, and the last of them stays. What does not fit is cut and ends in dots.
template <size_t size>
void copyText(char (&to)[size], const char* from, size_t length) {
  std::memcpy(to, from, std::min(length, size - 1));
  if (length > size - 1) std::memcpy(to + size - 4, "...", 3);
}

uint64_t hashOf(const std::string& text) {
  uint64_t hash = kHashSeed;
  for (const unsigned char byte : text) hash = mix(hash, byte);
  return hash;
}

std::string dtypeName(int16_t dtype) {
  const bool isKnown = dtype >= 0 && dtype < static_cast<int16_t>(at::ScalarType::NumOptions);
  return isKnown ? at::toString(static_cast<at::ScalarType>(dtype)) : "dtype " + std::to_string(dtype);
}

}  // namespace

uint64_t ProgramFingerprint::hash() const {
  uint64_t hash = mix(kHashSeed, sequence);
  hash = mix(hash, static_cast<uint64_t>(commonNumel));
  hash = mix(hash, static_cast<uint64_t>(static_cast<uint16_t>(dtype)) << 32U | static_cast<uint16_t>(reduceOp));
  hash = mix(hash, static_cast<uint64_t>(static_cast<uint32_t>(peer)));
  hash = mix(hash, configurationHash);
  for (size_t begin = 0; begin < sizeof(name); begin += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, name + begin, sizeof(word));
    // The upper bits of the last step would leave too early otherwise.
    hash = mix(hash, word) ^ (hash >> 29U);
  }
  // 0 is the hash of a rank that has not said anything.
  return hash == 0 ? 1 : hash;
}

ProgramFingerprint fingerprintOf(const Operation& operation) {
  ProgramFingerprint fingerprint{
      .sequence = operation.sequence,
      .numel = operation.numel,
      .commonNumel = operation.commonNumel == Operation::kOwnNumel ? operation.numel : operation.commonNumel,
      .dtype = static_cast<int16_t>(operation.dtype),
      .reduceOp = static_cast<int16_t>(operation.reduceOp),
      .peer = operation.peer};
  copyText(fingerprint.name, operation.name, std::strlen(operation.name));
  if (operation.configuration) {
    fingerprint.configurationHash = hashOf(*operation.configuration);
    copyText(fingerprint.configuration, operation.configuration->data(), operation.configuration->size());
  }
  return fingerprint;
}

std::string describe(const ProgramFingerprint& fingerprint) {
  std::ostringstream text;
  text << textOf(fingerprint.name) << " #" << fingerprint.sequence;
  const bool hasTensor = fingerprint.dtype != static_cast<int16_t>(at::ScalarType::Undefined);
  if (!hasTensor) return text.str();
  text << " (" << dtypeName(fingerprint.dtype) << "[" << fingerprint.numel << "]";
  const auto reduction = static_cast<size_t>(fingerprint.reduceOp);
  if (fingerprint.reduceOp >= 0 && reduction < kReductions.size()) text << ", " << kReductions[reduction];
  if (fingerprint.peer >= 0) text << ", peer rank " << fingerprint.peer;
  if (fingerprint.configuration[0] != '\0') text << ", " << textOf(fingerprint.configuration);
  text << ")";
  return text.str();
}

void checkSameProgram(const ProgramFingerprint& lower, const std::string& lowerRank, const ProgramFingerprint& higher,
                      const std::string& higherRank) {
  if (lower.hash() == higher.hash()) return;
  BAGUA_THROW(MismatchError, "the ranks do not make the same call: ", lowerRank, " is in ", describe(lower), ", ",
              higherRank, " in ", describe(higher),
              ". Nothing was exchanged. All ranks have to make the same calls in the same order, with the same sizes, "
              "dtypes, roots and reductions");
}

}  // namespace bagua
