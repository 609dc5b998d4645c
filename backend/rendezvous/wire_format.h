// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace bagua {

// The one version of all bytes that ranks send each other or share in memory. Ranks compare it in their records before
// any of them connects, so that two versions refuse each other with a sentence. Whoever changes one of these bytes, its
// meaning, or the order in which they are sent, raises it:
//
// - frames between processes: backend/net/frame.h
// - the preamble of an exchange: backend/cpu/preamble.h, with backend/operation/program_fingerprint.h
// - the memory that ranks of one host share: backend/cpu/shared_memory/meeting_room.h, backend/net/payload_memory.h
// - what ranks agree on about their line: backend/cpu/collectives/agreed_line.h
// - coded chunks: kernels/codecs/
// - the messages of an algorithm: algorithms/
//
// The records themselves are text that other versions can read (rank_record.h), and are not covered.
inline constexpr int kWireFormat = 14;

}  // namespace bagua
