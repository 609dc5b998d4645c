// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace bagua {

// An empty string is Python's None.
using OptionValue = std::variant<bool, int64_t, double, std::string>;

struct OptionInfo {
  std::string name;
  OptionValue defaultValue;
  std::string summary;
  // Whether Python may give a mapping, which becomes the text "a=b, c=d".
  bool takesMapping = false;
  // The option takes this beside values of the default's type: None, which is an empty string, or any value of this
  // type.
  std::optional<OptionValue> alsoTakes = {};

  [[nodiscard]] bool takesNone() const;
  // "an int", "a str or None": for an error.
  [[nodiscard]] std::string types() const;
};

// "True", "3", "0.5", "'all'", "None": as Python writes it.
std::string toString(const OptionValue& value);

// Throws ValueError where `declared` has no option of that name: the message lists those that there are, and says which
// of them, or of `others`, may have been meant. `others` are what the caller takes by name besides.
void checkOptionName(const std::string& algorithm, const std::vector<OptionInfo>& declared, const std::string& name,
                     const std::vector<std::string>& others = {});

// The options of one algorithm: every declared one has a value of a type that it takes.
class Options {
 public:
  // Throws as checkOptionName(), TypeError for a value of another type than the option takes, and ValueError for a
  // float that is not finite. An integer serves where a float is declared.
  Options(const std::string& algorithm, const std::vector<OptionInfo>& declared,
          const std::map<std::string, OptionValue>& given);

  template <typename T>
  [[nodiscard]] const T& get(const std::string& name) const {
    return std::get<T>(values_.at(name));
  }
  // The option is a whole number, or "auto", which gives nothing. Throws ValueError for another word.
  [[nodiscard]] std::optional<int64_t> numberUnlessAuto(const std::string& name) const;
  // "hierarchical=True, average=True": the same text on two ranks means the same options.
  [[nodiscard]] std::string toString() const;
  [[nodiscard]] const std::map<std::string, OptionValue>& values() const { return values_; }

 private:
  std::map<std::string, OptionValue> values_;
};

}  // namespace bagua
