// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/collectives.h"

#include <c10/util/Exception.h>

#include "algorithms/shared/compressed/exchange.h"
#include "backend/os/scratch_memory.h"

namespace bagua::compressed {
namespace {

void check(const at::Tensor& flat, const at::Tensor& own, const HostLanes& lanes, int rank) {
  TORCH_INTERNAL_ASSERT(flat.dim() == 1 && flat.is_contiguous() && own.dim() == 1 && own.is_contiguous());
  TORCH_INTERNAL_ASSERT(own.numel() == ownLength(lanes, rank) && own.scalar_type() == flat.scalar_type());
}

// All of the lanes.
at::Tensor ownOfSingleHost(const at::Tensor& flat, const HostLanes& lanes, int rank) {
  return flat.narrow(0, lanes.begin(lanes.firstLane(rank)), lanes.ownLength(rank));
}

}  // namespace

std::vector<Piece> ownPieces(const HostLanes& lanes, int rank) {
  std::vector<Piece> pieces;
  for (int lane = lanes.firstLane(rank); lane < lanes.endLane(rank); ++lane) {
    pieces.push_back(chunkOf(lanes, lane, lanes.ownHost()));
  }
  return pieces;
}

int64_t ownLength(const HostLanes& lanes, int rank) {
  int64_t length = 0;
  for (const auto& piece : ownPieces(lanes, rank)) length += piece.end - piece.begin;
  return length;
}

void reduceScatter(const at::Tensor& flat, at::Tensor& own, const HostLanes& lanes, double divisor,
                   const Coding& coding, StageSeconds& seconds, Communicator& communicator) {
  check(flat, own, lanes, communicator.rank());
  if (flat.numel() == 0) return;
  if (lanes.hostCount() == 1) {
    own.copy_(ownOfSingleHost(flat, lanes, communicator.rank()));
    if (divisor != 1) own.div_(divisor);
    return;
  }
  Exchange({{flat, own, lanes, coding}}, false, seconds, communicator).reduce(divisor);
}

void allGather(at::Tensor& flat, const at::Tensor& own, const HostLanes& lanes, const Coding& coding,
               StageSeconds& seconds, Communicator& communicator) {
  check(flat, own, lanes, communicator.rank());
  if (flat.numel() == 0) return;
  if (lanes.hostCount() == 1) {
    ownOfSingleHost(flat, lanes, communicator.rank()).copy_(own);
    return;
  }
  Exchange({{flat, own, lanes, coding}}, true, seconds, communicator).gather();
}

void allReduce(at::Tensor& flat, const HostLanes& lanes, double divisor, const Coding& coding, StageSeconds& seconds,
               Communicator& communicator) {
  if (flat.numel() == 0) return;
  if (lanes.hostCount() == 1) {
    if (divisor != 1) ownOfSingleHost(flat, lanes, communicator.rank()).div_(divisor);
    return;
  }
  allReduceTogether({{flat, lanes, coding}}, divisor, seconds, communicator);
}

std::optional<bool> allReduceTogether(const std::vector<FlatInLanes>& flats, double divisor, StageSeconds& seconds,
                                      Communicator& communicator) {
  std::vector<Section> sections;
  for (const auto& [flat, lanes, coding] : flats) {
    const at::Tensor own = scratchTensor({ownLength(lanes, communicator.rank())}, flat.options());
    check(flat, own, lanes, communicator.rank());
    sections.push_back({flat, own, lanes, coding});
  }
  Exchange exchange(sections, true, seconds, communicator);
  exchange.reduce(divisor);
  return exchange.gather();
}

}  // namespace bagua::compressed
