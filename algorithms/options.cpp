// SPDX-License-Identifier: Apache-2.0
#include "algorithms/options.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <sstream>

#include "kernels/closest_names.h"

namespace bagua {
namespace {

const char* typeName(const OptionValue& value) {
  constexpr std::array kNames = {"bool", "int", "float", "str"};
  return kNames.at(value.index());
}

// The text has the fewest digits, six or more, that lead back to the number: ranks compare these texts, and two numbers
// never share one.
std::string textOfNumber(double number) {
  for (int digits = 6;; ++digits) {
    std::ostringstream text;
    text.precision(digits);
    text << number;
    double back = 0;
    std::istringstream(text.str()) >> back;
    if (back == number || digits == std::numeric_limits<double>::max_digits10) return text.str();
  }
}

bool isNone(const OptionValue& value) { return value == OptionValue(std::string()); }

std::string namesOf(const std::vector<OptionInfo>& declared) {
  if (declared.empty()) return "none";
  std::string names;
  for (const auto& option : declared) names += (names.empty() ? "" : ", ") + option.name;
  return names;
}

}  // namespace

bool OptionInfo::takesNone() const { return isNone(defaultValue) || (alsoTakes && isNone(*alsoTakes)); }

std::string OptionInfo::types() const {
  std::string all =
      (std::holds_alternative<int64_t>(defaultValue) ? "an " : "a ") + std::string(typeName(defaultValue));
  if (takesMapping) all += " or mapping";
  if (alsoTakes && !isNone(*alsoTakes)) all += std::string(" or ") + typeName(*alsoTakes);
  return all + (takesNone() ? " or None" : "");
}

std::string toString(const OptionValue& value) {
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "True" : "False";
  if (const auto* text = std::get_if<std::string>(&value)) return text->empty() ? "None" : "'" + *text + "'";
  if (const auto* number = std::get_if<double>(&value)) return textOfNumber(*number);
  return std::to_string(std::get<int64_t>(value));
}

void checkOptionName(const std::string& algorithm, const std::vector<OptionInfo>& declared, const std::string& name,
                     const std::vector<std::string>& others) {
  std::vector<std::string> names;
  for (const auto& option : declared) names.push_back(option.name);
  if (std::find(names.begin(), names.end(), name) != names.end()) return;
  names.insert(names.end(), others.begin(), others.end());
  TORCH_CHECK_VALUE(false, "algorithm '", algorithm, "' has no option '", name, "'", suggestionFor(name, names),
                    "; its options are: ", namesOf(declared));
}

Options::Options(const std::string& algorithm, const std::vector<OptionInfo>& declared,
                 const std::map<std::string, OptionValue>& given) {
  for (const auto& option : declared) values_[option.name] = option.defaultValue;
  for (const auto& [name, value] : given) {
    checkOptionName(algorithm, declared, name);
    const auto& option =
        *std::find_if(declared.begin(), declared.end(), [&](const auto& one) { return one.name == name; });
    OptionValue converted = value;
    if (std::holds_alternative<double>(option.defaultValue) && std::holds_alternative<int64_t>(value)) {
      converted = static_cast<double>(std::get<int64_t>(value));
    }
    const bool isTaken = converted.index() == option.defaultValue.index() ||
                         (option.alsoTakes && converted.index() == option.alsoTakes->index());
    TORCH_CHECK_TYPE(isTaken, "option '", name, "' of algorithm '", algorithm, "' takes ", option.types(), ", got ",
                     bagua::toString(value), " (", typeName(value), ")");
    const auto* const number = std::get_if<double>(&converted);
    TORCH_CHECK_VALUE(number == nullptr || std::isfinite(*number), "option '", name, "' of algorithm '", algorithm,
                      "' takes a finite number, got ", bagua::toString(converted));
    values_[name] = converted;
  }
}

std::optional<int64_t> Options::numberUnlessAuto(const std::string& name) const {
  const OptionValue& value = values_.at(name);
  if (const auto* const number = std::get_if<int64_t>(&value)) return *number;
  TORCH_CHECK_VALUE(std::get<std::string>(value) == "auto", "option '", name, "' takes a number or 'auto', got ",
                    bagua::toString(value));
  return std::nullopt;
}

std::string Options::toString() const {
  std::string text;
  for (const auto& [name, value] : values_) text += (text.empty() ? "" : ", ") + name + "=" + bagua::toString(value);
  return text;
}

}  // namespace bagua
