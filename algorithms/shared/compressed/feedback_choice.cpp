// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/feedback_choice.h"

#include <c10/util/Exception.h>

#include <string>
#include <utility>

namespace bagua::compressed {

FeedbackChoice::FeedbackChoice(OptionValue value) : value_(std::move(value)) {
  TORCH_CHECK_VALUE(std::holds_alternative<bool>(value_) || std::get<std::string>(value_) == "auto",
                    "bagua: error_feedback must be 'auto', True or False, got ", toString(value_));
}

bool FeedbackChoice::isOnFor(const CodecInfo& codec) const {
  if (const auto* const isOn = std::get_if<bool>(&value_)) return *isOn;
  const double bits = codec.bitsPerElement();
  if (bits >= 8) return false;
  return bits >= 4 || (bits >= 2 && isLinear_);
}

}  // namespace bagua::compressed
