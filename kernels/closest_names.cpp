// SPDX-License-Identifier: Apache-2.0
#include "kernels/closest_names.h"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <limits>

namespace bagua {
namespace {

constexpr size_t kMostSuggestions = 3;
// Shorter texts are part of too many names.
constexpr size_t kShortestPart = 3;

bool isDigit(char character) { return std::isdigit(static_cast<unsigned char>(character)) != 0; }

std::string normalised(std::string name) {
  for (char& character : name) {
    if (character == '-' || character == ' ') character = '_';
    character = static_cast<char>(std::tolower(static_cast<unsigned char>(character)));
  }
  return name;
}

// Another digit is another meaning ("8bit", "4bit"), not a slip of the finger.
size_t substitutionCost(char one, char other) {
  if (one == other) return 0;
  return isDigit(one) || isDigit(other) ? 2 : 1;
}

// Insertions, deletions, substitutions and swaps of neighbours that turn one text into the other: the optimal string
// alignment distance.
size_t distance(const std::string& one, const std::string& other) {
  std::vector<std::vector<size_t>> cost(one.size() + 1, std::vector<size_t>(other.size() + 1));
  for (size_t i = 0; i <= one.size(); ++i) cost[i][0] = i;
  for (size_t j = 0; j <= other.size(); ++j) cost[0][j] = j;
  for (size_t i = 1; i <= one.size(); ++i) {
    for (size_t j = 1; j <= other.size(); ++j) {
      cost[i][j] = std::min(
          {cost[i - 1][j] + 1, cost[i][j - 1] + 1, cost[i - 1][j - 1] + substitutionCost(one[i - 1], other[j - 1])});
      if (i > 1 && j > 1 && one[i - 1] == other[j - 2] && one[i - 2] == other[j - 1])
        cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
    }
  }
  return cost[one.size()][other.size()];
}

bool isPartOf(const std::string& one, const std::string& other) {
  return one.size() >= kShortestPart && other.find(one) != std::string::npos;
}

std::vector<std::string> closestNames(const std::string& name, const std::vector<std::string>& known) {
  const std::string wanted = normalised(name);
  const size_t most = std::max<size_t>(1, wanted.size() / 3);
  size_t least = std::numeric_limits<size_t>::max();
  std::vector<std::string> closest;
  std::vector<std::string> related;
  for (const auto& candidate : known) {
    const std::string other = normalised(candidate);
    const size_t found = distance(wanted, other);
    if (found <= most && found < least) {
      least = found;
      closest.clear();
    }
    if (found <= most && found == least) closest.push_back(candidate);
    if (isPartOf(wanted, other) || isPartOf(other, wanted)) related.push_back(candidate);
  }
  return closest.empty() ? related : closest;
}

}  // namespace

std::string suggestionFor(const std::string& name, const std::vector<std::string>& known) {
  auto names = closestNames(name, known);
  names.resize(std::min(names.size(), kMostSuggestions));
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    const bool isLast = i + 1 == names.size();
    text += (i == 0 ? "" : isLast ? " or " : ", ") + ("'" + names[i] + "'");
  }
  return text.empty() ? "" : " (did you mean " + text + "?)";
}

}  // namespace bagua
