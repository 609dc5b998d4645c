// SPDX-License-Identifier: Apache-2.0
#include "backend/operation/program_fingerprint.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <sstream>

#include "backend/operation/hash.h"
#include "backend/operation/peer_errors.h"
#include "backend/operation/reduction_names.h"

namespace bagua {
namespace {

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

std::string lowerCase(std::string text) {
  for (char& letter : text) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  return text;
}

// What a user has to change. Ranks that have loaded other states come with other steps or gradients.
std::string adviceFor(const ProgramFingerprint& lower, const ProgramFingerprint& higher) {
  ProgramFingerprint loadedAlike = higher;
  loadedAlike.step = lower.step;
  loadedAlike.gradientsHash = lower.gradientsHash;
  std::ostringstream found;
  // The hook of one model, perhaps in another call: at step 0 some exchange more than later.
  if (lower.configurationHash == higher.configurationHash && lower.step != higher.step) {
    found << "Their algorithms are at step " << lower.step << " and step " << higher.step
          << ": all ranks have to take the same number of steps. ";
  }
  if (loadedAlike.hash() == lower.hash() && lower.gradientsHash != higher.gradientsHash) {
    found << "Their bucket layouts differ: the gradients travel in another order, others of them together, or at other "
             "levels of the guard. ";
  }
  if (found.str().empty()) {
    return "All ranks have to make the same calls in the same order, with the same sizes, dtypes, roots and reductions";
  }
  return found.str() + "Load the handle's state_dict on all ranks, of the same step, or on none";
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
  hash = mix(hash, static_cast<uint64_t>(gradientsHash) << 32U | step);
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
      .peer = operation.peer,
      .step = operation.step};
  copyText(fingerprint.name, operation.name, std::strlen(operation.name));
  if (operation.configuration) {
    fingerprint.configurationHash = hashOf(*operation.configuration);
    copyText(fingerprint.configuration, operation.configuration->data(), operation.configuration->size());
  }
  if (operation.gradients) {
    fingerprint.gradientsHash = operation.gradients->hash;
    copyText(fingerprint.gradients, operation.gradients->text.data(), operation.gradients->text.size());
  }
  return fingerprint;
}

std::string describe(const ProgramFingerprint& fingerprint) {
  std::ostringstream text;
  text << textOf(fingerprint.name) << " #" << fingerprint.sequence;
  const bool hasTensor = fingerprint.dtype != static_cast<int16_t>(at::ScalarType::Undefined);
  if (!hasTensor) return text.str();
  text << " (" << dtypeName(fingerprint.dtype) << "[" << fingerprint.numel << "]";
  if (fingerprint.reduceOp >= 0) text << ", " << lowerCase(reductionName(fingerprint.reduceOp));
  if (fingerprint.peer >= 0) text << ", peer rank " << fingerprint.peer;
  if (fingerprint.configuration[0] != '\0') text << ", " << textOf(fingerprint.configuration);
  if (fingerprint.gradients[0] != '\0') text << ", gradients " << textOf(fingerprint.gradients);
  text << ")";
  return text.str();
}

void checkSameProgram(const ProgramFingerprint& lower, const std::string& lowerRank, const ProgramFingerprint& higher,
                      const std::string& higherRank) {
  if (lower.hash() == higher.hash()) return;
  BAGUA_THROW(MismatchError, "the ranks do not make the same call: ", lowerRank, " is in ", describe(lower), ", ",
              higherRank, " in ", describe(higher), ". Nothing was exchanged between them. ", adviceFor(lower, higher));
}

}  // namespace bagua
