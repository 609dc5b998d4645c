// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

// How long the parts of a group's health wait for each other, for the store and for the other ranks.
namespace bagua {

// How often the thread looks at this rank's operations, and at the store while one of them takes its time or ranks are
// being asked. In a large group the looks at the store are rarer: it serves all ranks.
inline constexpr std::chrono::milliseconds kTick{100};
// At the store, where no beat has told of news.
inline constexpr std::chrono::seconds kLongestWithoutLook{10};
inline constexpr std::chrono::milliseconds kReportTick{20};
inline constexpr std::chrono::milliseconds kBusyLook{200};
inline constexpr std::chrono::milliseconds kIdleLook{500};
inline constexpr std::chrono::milliseconds kLookPerRank{1};
// How long ranks may take to answer a roll call. An idle one looks every kIdleLook.
inline constexpr std::chrono::milliseconds kAnswerTime{1000};
// How long before a timeout the roll is called, so that the error knows the answers.
inline constexpr std::chrono::milliseconds kRollCallLead{2000};
// How long a rank may be gone before that ends the operations: what is over by then needed nothing more of it.
inline constexpr std::chrono::milliseconds kGoneTime{300};
// How long a symptom waits for the rank that knows the cause, and for all to answer.
inline constexpr std::chrono::milliseconds kCauseTime{1000};
// How long a rank that has called the roll may be behind with what it was to report, before another takes its place.
inline constexpr std::chrono::milliseconds kTurnTime{500};
// How long a rank that reports for all waits before its own callers learn of it: the others look within this time, and
// a process that ends at once may take the store with it.
inline constexpr std::chrono::milliseconds kReadingTime{500};
// How long the caller of an operation waits until the ranks have agreed on a cause.
inline constexpr std::chrono::milliseconds kAgreementTime{3000};
// How long a store that works may take to answer.
inline constexpr std::chrono::milliseconds kStoreTime{2000};
// A store that throws is tried again after the first of these, then after twice that time, and so on up to the second.
inline constexpr std::chrono::milliseconds kShortestPause{100};
inline constexpr std::chrono::milliseconds kLongestPause{5000};
// How long the caller of an operation waits for a store that is in trouble: it may be over in a moment.
inline constexpr std::chrono::milliseconds kTroubleTime{1000};
// How long a transport goes on beyond the timeout of an operation.
inline constexpr std::chrono::milliseconds kPatience{3000};
// How long stop() waits for the thread. Whoever calls may hold the GIL, which the thread can need to drop a tensor.
inline constexpr std::chrono::milliseconds kStopTime{300};
inline constexpr int kWarningInterval = 2;  // the next warning comes after this many times as long

}  // namespace bagua
