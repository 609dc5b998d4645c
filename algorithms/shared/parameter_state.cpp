// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/parameter_state.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <utility>

#include "kernels/device_ways.h"

namespace bagua {
namespace {

// Calls visit(entry, begin of it in the flat tensor, elements of it that the piece covers, counted in the flat tensor).
template <typename Visit>
void forEachOverlap(const Bucket& bucket, const Piece& piece, Visit&& visit) {
  int64_t begin = 0;
  for (const auto& entry : bucket.entries) {
    const int64_t end = begin + entry.gradient.numel();
    const Piece overlap{std::max(begin, piece.begin), std::min(end, piece.end)};
    if (overlap.begin < overlap.end) visit(entry, begin, overlap);
    begin = end;
  }
}

// "<prefix><number>" -> the number; -1 for other texts.
int64_t numberAfter(const std::string& prefix, const std::string& text) {
  if (!text.starts_with(prefix)) return -1;
  int64_t number = -1;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data() + prefix.size(), end, number);
  return error == std::errc() && stop == end ? number : -1;
}

std::vector<Piece> piecesOf(const AlgorithmState& state, const std::string& name, int64_t numel) {
  const auto entry = state.find(name + ".pieces");
  if (entry == state.end()) return {{0, numel}};
  const at::Tensor& given = entry->second;
  TORCH_CHECK_VALUE(given.scalar_type() == at::kLong && given.dim() == 2 && given.size(1) == 2, "bagua: '",
                    entry->first, "' of the checkpoint is no list of pieces");
  const at::Tensor bounds = given.cpu().contiguous();
  std::vector<Piece> pieces;
  int64_t covered = 0;
  int64_t last = 0;
  for (int64_t i = 0; i < bounds.size(0); ++i) {
    const Piece piece{bounds.const_data_ptr<int64_t>()[2 * i], bounds.const_data_ptr<int64_t>()[2 * i + 1]};
    TORCH_CHECK_VALUE(last <= piece.begin && piece.begin < piece.end && piece.end - piece.begin <= numel - covered,
                      "bagua: '", entry->first, "' of the checkpoint does not fit its ", numel, " values");
    covered += piece.end - piece.begin;
    last = piece.end;
    pieces.push_back(piece);
  }
  TORCH_CHECK_VALUE(covered == numel, "bagua: '", entry->first, "' of the checkpoint covers ", covered, " of ", numel,
                    " values");
  return pieces;
}

}  // namespace

void keepFinite(const at::Tensor& residuals) {
  constexpr double kMost = std::numeric_limits<float>::max();
  residuals.clamp_(-kMost, kMost);
}

at::Tensor ParameterState::flatFor(const Bucket& bucket) { return flatFor(bucket, {{0, bucket.flat.numel()}}); }

at::Tensor ParameterState::flatFor(const Bucket& bucket, const std::vector<Piece>& pieces) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto positions = positionsOf(bucket.entries);
  for (const auto& layout : layouts_) {
    if (layout.positions == positions && layout.pieces == pieces) return layout.flat;
  }
  const at::Tensor flat = pack(bucket, pieces);
  dropLayoutsOf(positions);
  layouts_.push_back({positions, pieces, flat});
  return flat;
}

// Of those that held one of these parameters nothing is left that could be asked for.
void ParameterState::dropLayoutsOf(const std::vector<int64_t>& positions) {
  std::erase_if(layouts_, [&](const Layout& layout) { return shareOne(layout.positions, positions); });
}

void ParameterState::forget(const std::vector<int64_t>& positions, Bucket::Retained& retained) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const int64_t position : positions) {
    const auto found = held_.find(position);
    if (found == held_.end()) continue;
    for (const auto& part : found->second.parts) {
      if (!worksOnCpu(part.values)) retained.push_back(part.values);
    }
    held_.erase(found);
  }
  dropLayoutsOf(positions);
}

at::Tensor ParameterState::pack(const Bucket& bucket, const std::vector<Piece>& pieces) {
  int64_t numel = 0;
  int64_t last = 0;
  for (const auto& piece : pieces) {
    TORCH_INTERNAL_ASSERT(last <= piece.begin && piece.begin <= piece.end && piece.end <= bucket.flat.numel());
    last = piece.end;
    numel += piece.end - piece.begin;
  }
  const at::Tensor flat = at::zeros({numel}, bucket.flat.options().dtype(at::kFloat));
  std::map<int64_t, std::vector<Part>> wanted;
  for (const auto& entry : bucket.entries) {
    wanted[entry.parameter];
    Held& held = held_[entry.parameter];
    held.numel = entry.gradient.numel();
    TORCH_CHECK_VALUE(held.parts.empty() || held.parts.back().end() <= held.numel, "bagua: '", name_, ".",
                      entry.parameter, "' of the checkpoint has values for ", held.parts.back().end(),
                      " elements or more, parameter ", entry.parameter, " has ", held.numel);
  }
  int64_t begin = 0;
  for (const auto& piece : pieces) {
    forEachOverlap(bucket, piece, [&](const BucketEntry& entry, int64_t entryBegin, const Piece& overlap) {
      const int64_t place = begin + overlap.begin - piece.begin;
      wanted[entry.parameter].push_back(
          {overlap.begin - entryBegin, flat.narrow(0, place, overlap.end - overlap.begin)});
    });
    begin += piece.end - piece.begin;
  }
  for (const auto& [position, parts] : wanted) {
    Held& held = held_[position];
    // Those of a checkpoint are memory of the stream that loaded it, which may take it for something else.
    for (const auto& part : held.parts) {
      if (!worksOnCpu(part.values)) bucket.retained->push_back(part.values);
    }
    move(held, parts);
  }
  return flat;
}

// Every old value goes to the part that wants it, or is an orphan.
void ParameterState::move(Held& held, const std::vector<Part>& wanted) {
  std::vector<Part> old = std::move(held.parts);
  old.insert(old.end(), held.orphans.begin(), held.orphans.end());
  held.orphans.clear();
  for (const auto& part : old) {
    // Of `part`, from here on nothing has found a place yet. `wanted` is in ascending order.
    int64_t rest = part.begin;
    const auto values = [&](int64_t begin, int64_t end) {
      return part.values.narrow(0, begin - part.begin, end - begin);
    };
    const auto orphan = [&](int64_t end) {
      if (rest < end) held.orphans.push_back({rest, values(rest, end).clone()});
    };
    for (const auto& place : wanted) {
      const int64_t begin = std::max(rest, place.begin);
      const int64_t end = std::min(part.end(), place.end());
      if (begin >= end) continue;
      orphan(begin);
      place.values.narrow(0, begin - place.begin, end - begin).copy_(values(begin, end));
      rest = end;
    }
    orphan(part.end());
  }
  held.parts = wanted;
}

std::vector<ParameterState::Orphan> ParameterState::takeOrphans(const Bucket& bucket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Orphan> orphans;
  int64_t begin = 0;
  for (const auto& entry : bucket.entries) {
    for (const auto& part : std::exchange(held_[entry.parameter].orphans, {})) {
      orphans.push_back({begin + part.begin, part.values});
    }
    begin += entry.gradient.numel();
  }
  return orphans;
}

void ParameterState::rescale(double factor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [position, held] : held_) {
    for (const auto& part : held.parts) keepFinite(part.values.mul_(factor));
    for (const auto& part : held.orphans) keepFinite(part.values.mul_(factor));
  }
}

int64_t ParameterState::bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t bytes = 0;
  for (const auto& [position, held] : held_) {
    for (const auto& part : held.parts) bytes += static_cast<int64_t>(part.values.nbytes());
  }
  return bytes;
}

AlgorithmState ParameterState::state() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  AlgorithmState state;
  for (const auto& [position, held] : held_) {
    if (held.parts.empty()) continue;
    const std::string name = name_ + "." + std::to_string(position);
    std::vector<at::Tensor> values;
    const at::Tensor pieces = at::empty({static_cast<int64_t>(held.parts.size()), 2}, at::kLong);
    auto* bound = pieces.mutable_data_ptr<int64_t>();
    for (const auto& part : held.parts) {
      values.push_back(part.values);
      *bound++ = part.begin;
      *bound++ = part.end();
    }
    state.emplace(name, at::cat(values));
    const bool isWhole = held.parts.size() == 1 && held.parts[0].begin == 0 && held.parts[0].end() == held.numel;
    if (!isWhole) state.emplace(name + ".pieces", pieces);
  }
  return state;
}

bool ParameterState::takes(const std::string& entry, const AlgorithmState& state) const {
  static const std::string kPieces = ".pieces";
  const bool isOfPieces = entry.ends_with(kPieces);
  const std::string values = isOfPieces ? entry.substr(0, entry.size() - kPieces.size()) : entry;
  return numberAfter(name_ + ".", values) >= 0 && state.contains(values);
}

void ParameterState::load(const AlgorithmState& state, const std::vector<at::Tensor>& parameters) {
  std::map<int64_t, Held> loaded;
  for (const auto& [name, values] : state) {
    const int64_t position = numberAfter(name_ + ".", name);
    if (position < 0) continue;
    TORCH_CHECK_VALUE(values.scalar_type() == at::kFloat && values.dim() == 1, "bagua: '", name,
                      "' of the checkpoint is no flat tensor of float32");
    Held& held = loaded[position];
    int64_t begin = 0;
    for (const auto& piece : piecesOf(state, name, values.numel())) {
      const int64_t length = piece.end - piece.begin;
      held.parts.push_back({piece.begin, values.narrow(0, begin, length).clone()});
      begin += length;
    }
    if (!state.contains(name + ".pieces")) held.numel = values.numel();
    if (parameters.empty()) continue;
    TORCH_CHECK_VALUE(position < static_cast<int64_t>(parameters.size()), "bagua: the checkpoint has '", name,
                      "', this model has ", parameters.size(), " trainable parameters");
    const int64_t numel = parameters[position].numel();
    const int64_t end = held.parts.empty() ? 0 : held.parts.back().end();
    TORCH_CHECK_VALUE(end <= numel && (held.numel < 0 || held.numel == numel), "bagua: '", name,
                      "' of the checkpoint has values for ", end, " elements, parameter ", position, " has ", numel);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  held_ = std::move(loaded);
  layouts_.clear();
}

}  // namespace bagua
