// SPDX-License-Identifier: Apache-2.0
#include "backend/health/attendance.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <charconv>
#include <iomanip>
#include <sstream>

namespace bagua {
namespace {

constexpr char kFieldEnd = '\t';
constexpr char kLineEnd = '\n';
constexpr size_t kFields = 9;

std::string seconds(std::chrono::milliseconds age) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << static_cast<double>(age.count()) / 1000 << " s";
  return text.str();
}

std::vector<std::string> split(const std::string& text, char end) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, end);) parts.push_back(part);
  return parts;
}

template <typename Number>
bool read(const std::string& text, Number& number) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && stop == end;
}

void encodeMoment(std::ostringstream& text, const Activity::Moment& moment) {
  text << kFieldEnd << moment.sequence << kFieldEnd << moment.hash << kFieldEnd << moment.age.count() << kFieldEnd
       << (moment.exists ? moment.text : "");
}

bool decodeMoment(const std::vector<std::string>& fields, size_t first, Activity::Moment& moment) {
  int64_t age = 0;
  if (!read(fields[first], moment.sequence) || !read(fields[first + 1], moment.hash) || !read(fields[first + 2], age)) {
    return false;
  }
  moment.age = std::chrono::milliseconds(age);
  moment.text = fields[first + 3];
  moment.exists = !moment.text.empty();
  return true;
}

}  // namespace

std::string Activity::describe() const {
  if (current.exists) return c10::str("has been in ", current.text, " for ", seconds(current.age));
  if (completed.exists) {
    return c10::str("has nothing under way, last completed ", completed.text, " ", seconds(completed.age), " ago");
  }
  return "has not begun any operation";
}

Activity::Moment momentOf(const ProgramFingerprint& program, std::chrono::steady_clock::time_point since) {
  const auto age = std::chrono::steady_clock::now() - since;
  return {.exists = true,
          .sequence = program.sequence,
          .hash = program.hash(),
          .age = std::chrono::duration_cast<std::chrono::milliseconds>(age),
          .text = describe(program)};
}

std::string encode(const std::vector<Activity>& activities) {
  std::ostringstream text;
  for (const auto& activity : activities) {
    text << activity.executor;
    encodeMoment(text, activity.completed);
    encodeMoment(text, activity.current);
    // Ends the last field, which would otherwise be lost where it is empty.
    text << kFieldEnd << kLineEnd;
  }
  return text.str();
}

std::vector<Activity> decodeActivities(const std::string& text) {
  std::vector<Activity> activities;
  for (const auto& line : split(text, kLineEnd)) {
    const auto fields = split(line, kFieldEnd);
    if (fields.size() != kFields) continue;
    Activity activity{.executor = fields[0], .completed = {}, .current = {}};
    if (decodeMoment(fields, 1, activity.completed) && decodeMoment(fields, 5, activity.current)) {
      activities.push_back(std::move(activity));
    }
  }
  return activities;
}

std::string Attendance::describe() const {
  std::vector<std::string> missing;
  for (const auto& [rank, activity] : absent) missing.push_back(c10::str("rank ", rank, " (", activity, ")"));
  for (const int rank : silent) {
    missing.push_back(
        c10::str("rank ", rank, " (does not answer: it has ended or left the group, is stopped, or is cut off)"));
  }
  std::string text = missing.empty() ? "" : " Not there: " + c10::Join(", ", missing) + ".";
  if (!waiting.empty()) text += " Waiting as well: rank " + c10::Join(", rank ", waiting) + ".";
  return text;
}

Attendance attendanceOf(const ProgramFingerprint& operation, bool isMessage, const std::string& executor,
                        const std::map<int, std::vector<Activity>>& answers, const std::vector<int>& silent) {
  Attendance attendance{.waiting = {}, .absent = {}, .silent = silent};
  for (const auto& [rank, activities] : answers) {
    std::vector<Activity> found;
    std::ranges::copy_if(activities, std::back_inserter(found),
                         [&](const Activity& activity) { return activity.executor == executor; });
    const auto isInIt = [&](const Activity& activity) {
      return activity.current.exists && activity.current.hash == operation.hash();
    };
    const auto isPast = [&](const Activity& activity) {
      return activity.completed.exists && activity.completed.sequence >= operation.sequence;
    };
    if (!isMessage && std::ranges::any_of(found, isInIt)) {
      attendance.waiting.push_back(rank);
    } else if (isMessage || std::ranges::none_of(found, isPast)) {
      attendance.absent.emplace(rank, found.empty() ? Activity{}.describe() : found.front().describe());
    }
    // Otherwise its part is done: the root of a broadcast, for one.
  }
  return attendance;
}

}  // namespace bagua
